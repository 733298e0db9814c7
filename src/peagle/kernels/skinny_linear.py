"""Products of a few rows with a weight: what a GPU does when it decodes for one or two requests.

Such a product is nothing but reading the weight once, which libraries made for larger ones do not always do at the
memory's speed. This kernel gives every core an equal share of the weight's rows, and takes SwiGLU or the residual's sum
along. Which is faster on a card and shape is measured once (`tune`); what has not been measured is left to the library.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.errors import TritonError

from peagle.kernels.early_launch import early_launch

REQUESTS = tl.constexpr(32)  # of a program, for the next product's weight
MAX_ROWS = 16  # the height of a tile of the matrix units
Mode = Literal["plain", "gated", "added"]


class Config(NamedTuple):
    """columns (of the output) a program, depth a turn, turns in flight (stages).

    splits: the depth is shared by so many programs, whose sums the caller adds up ("plain" only). weight_first: the
    product is taken as weight x rows, so that the weight's rows fill the 64 of Hopper's matrix instruction (64 columns
    or more). prefetch: bytes of the weight that a program launched early has fetched into the L2 cache before it waits.
    rolls: it goes on so far ahead of what it reads, so that the memory does not idle while that comes from the cache; a
    request for each so many bytes (64 or 128: how much a request brings is the card's affair), 0: not.
    beyond: bytes that it has fetched, before it waits, of the weight that the next product will read.
    """

    columns: int
    depth: int
    stages: int
    splits: int = 1
    weight_first: bool = False
    prefetch: int = 1 << 16
    rolls: int = 0
    beyond: int = 0


CONFIGS = (Config(16, 256, 4), Config(32, 128, 5), Config(64, 128, 4))
# (mode, weight rows, weight columns) -> the fastest; None: the library
_fastest: dict[tuple[Mode, int, int], Config | None] = {}


@triton.jit
def _prefetch(ptr, size):
    """Have the L2 cache fetch `size` bytes from each of 128 addresses, a thread each; nobody waits for them. Neighbours
    should have the same one: threads of a warp make different requests in turn."""
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [ptr.to(tl.int64), tl.full([128], size, tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _prefetch_tile(
    weight_ptr, row, k, width, last, depth, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """Have the L2 cache fetch the tile of the weight that begins at (row, k), as far as it is the program's, by a
    request for each STEP elements of a row."""
    n = tl.arange(0, BLOCK_N)
    column = k + tl.arange(0, BLOCK_K // STEP) * STEP
    address = weight_ptr + (row + n).to(tl.int64)[:, None] * depth + column[None]
    inside = (row + n < width)[:, None] & (column < last)[None]
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
        [address.to(tl.int64), inside.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _skinny_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, next_ptr,
    rows, width, depth, share, ahead, beyond, x_stride, out_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ADDED: tl.constexpr, WEIGHT_FIRST: tl.constexpr, IS_CHAINED: tl.constexpr,
    HAS_PREFETCH: tl.constexpr, ROLLS: tl.constexpr, HAS_BEYOND: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(1)
    first = split * share
    last = tl.minimum(first + share, depth)
    up_ptr = weight_ptr + width.to(tl.int64) * depth
    row = tl.program_id(0) * BLOCK_N
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        # No kernel writes weights, so they may be on their way while the kernel that makes x still runs.
        thread = tl.arange(0, 128)
        if HAS_PREFETCH:
            start = tl.minimum(row + thread * BLOCK_N // 128, width - 1).to(tl.int64) * depth + first
            _prefetch(weight_ptr + start, ahead)
            if GATED:
                _prefetch(up_ptr + start, ahead)
        if HAS_BEYOND:
            program = split * tl.num_programs(0) + tl.program_id(0)
            _prefetch(next_ptr + (program * REQUESTS + thread * REQUESTS // 128).to(tl.int64) * (beyond // 2), beyond)
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, 16)
    column = row + tl.arange(0, BLOCK_N)
    inside = column < width
    offset = column.to(tl.int64)[:, None] * depth
    acc = tl.zeros([BLOCK_N, 16] if WEIGHT_FIRST else [16, BLOCK_N], tl.float32)
    up = tl.zeros([BLOCK_N, 16] if WEIGHT_FIRST else [16, BLOCK_N], tl.float32)
    for k0 in range(first, last, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        if ROLLS > 0:
            _prefetch_tile(weight_ptr, row, k0 + ahead // 2, width, last, depth, BLOCK_N, BLOCK_K, ROLLS // 2)
            if GATED:
                _prefetch_tile(up_ptr, row, k0 + ahead // 2, width, last, depth, BLOCK_N, BLOCK_K, ROLLS // 2)
        x_mask, w_mask = (m < rows)[:, None], inside[:, None]
        if not EVEN:
            x_mask, w_mask = x_mask & (k < last)[None], w_mask & (k < last)[None]
        x = tl.load(x_ptr + m[:, None] * x_stride + k[None], mask=x_mask, other=0.0)
        weight = tl.load(weight_ptr + offset + k[None], mask=w_mask, other=0.0)
        if WEIGHT_FIRST:
            acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
        else:
            acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if GATED:
            weight = tl.load(up_ptr + offset + k[None], mask=w_mask, other=0.0)
            if WEIGHT_FIRST:
                up = tl.dot(weight, tl.trans(x), up, input_precision="ieee")
            else:
                up = tl.dot(x, tl.trans(weight), up, input_precision="ieee")
    if WEIGHT_FIRST:
        acc, up = tl.trans(acc), tl.trans(up)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=inside & (column * 0 + split == 0), other=0.0).to(tl.float32)[None]
    out = out_ptr + split.to(tl.int64) * rows * out_stride + m[:, None] * out_stride + column[None]
    live = (m < rows)[:, None] & inside[None]
    if GATED:
        # rounded where a product of its own would be
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = acc * tl.sigmoid(acc) * up
    if ADDED:
        acc += tl.load(out, mask=live, other=0.0).to(tl.float32)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live)


def skinny(
    mode: Mode,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    config: Config,
    is_chained: bool = False,
    following: Tensor | None = None,
) -> Tensor:
    """Into out [M, N], from x [M, K] with M at most MAX_ROWS and contiguous weight: x @ weight.T (+ bias) ("plain");
    silu of the product with the weight's first half times that with its second ("gated"); added to `out` ("added").

    With config.splits S above 1, out is [S, M, N] float32, contiguous, and its sum over S is the product.
    is_chained: the launch is an early one (`early_launch`). following: the weight that the next product will read.
    """
    rows, depth = x.shape
    width = weight.shape[0] // 2 if mode == "gated" else weight.shape[0]
    share = triton.cdiv(triton.cdiv(depth, config.splits), config.depth) * config.depth
    # bytes of each row of the weight, within the smallest share; a request is of a multiple of 16
    height = config.columns * (2 if mode == "gated" else 1)
    ahead = min(config.prefetch // height, 2 * (depth - (config.splits - 1) * share))
    has_prefetch = is_chained and ahead >= 16 and depth % 8 == 0 and weight.element_size() == 2
    grid = (triton.cdiv(width, config.columns), config.splits)
    beyond, upcoming = 0, weight if following is None else following
    if is_chained and following is not None and weight.element_size() == 2:
        programs = grid[0] * grid[1]
        beyond = min(config.beyond, following.nbytes // programs) // (16 * REQUESTS.value) * 16
    _skinny_kernel[grid](
        out, x, weight, weight if bias is None else bias, upcoming,
        rows, width, depth, share, ahead // 16 * 16, beyond, x.stride(0), out.stride(-2),
        BLOCK_N=config.columns, BLOCK_K=config.depth, EVEN=depth % config.depth == 0, HAS_BIAS=bias is not None,
        GATED=mode == "gated", ADDED=mode == "added", WEIGHT_FIRST=config.weight_first, IS_CHAINED=is_chained,
        HAS_PREFETCH=has_prefetch, ROLLS=config.rolls if has_prefetch else 0, HAS_BEYOND=beyond > 0,
        num_stages=config.stages, num_warps=4, **early_launch(is_chained),
    )  # fmt: skip
    return out


def fastest(mode: Mode, x: Tensor, weight: Tensor) -> Config | None:
    """What `tune` found for this shape; None: the library, also for more rows and what was never measured."""
    return _fastest.get((mode, *weight.shape)) if len(x) <= MAX_ROWS else None


def findings() -> dict[str, str]:
    """What `tune` has chosen so far, to be read by people."""
    return {
        f"{mode} {height}x{depth}": "library"
        if config is None
        else "columns {}, depth {}, stages {}".format(*config[:3])
        for (mode, height, depth), config in _fastest.items()
    }


def tune(mode: Mode, weights: Sequence[Tensor], library: Callable[[Tensor, Tensor], object], rows: int = 8) -> None:
    """Measure, on the weights of some layers in turn (so that none is found in a cache), the library and every config.

    library: (x, weight) -> the product of this mode.
    """
    key = (mode, *weights[0].shape)
    if key in _fastest:
        return
    weight = weights[0]
    width = weight.shape[0] // 2 if mode == "gated" else weight.shape[0]
    x = torch.zeros(rows, weight.shape[1], dtype=weight.dtype, device=weight.device)
    out = torch.zeros(rows, width, dtype=weight.dtype, device=weight.device)
    _fastest[key] = None
    best = _time(library, x, weights)
    for config in CONFIGS:

        def ours(x: Tensor, weight: Tensor, config: Config = config) -> object:
            return skinny(mode, x, weight, None, out, config)

        try:
            took = _time(ours, x, weights)
        except TritonError:  # say, more shared memory than the card has
            continue
        if took < best:
            best, _fastest[key] = took, config


def _time(product: Callable[[Tensor, Tensor], object], x: Tensor, weights: Sequence[Tensor]) -> float:
    """Milliseconds for all weights, the median of several replays of a graph: eager launches would hide the work."""

    def run() -> None:
        for weight in weights:
            product(x, weight)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(7):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:])
