"""Products of a few rows with a weight: what a GPU does when it decodes for one or two requests.

Such a product is nothing but reading the weight once, which libraries made for larger ones do not always do at the
memory's speed. This kernel gives every core an equal share of the weight's rows, and takes SwiGLU or the residual's sum
along. Which is faster on a card and shape is measured once (`tune`); what has not been measured is left to the library.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_ROWS = 16  # the height of a tile of the matrix units
Mode = Literal["plain", "gated", "added"]
Config = tuple[int, int, int]  # columns a program, depth a turn, turns in flight

CONFIGS: tuple[Config, ...] = ((16, 256, 4), (32, 128, 5), (64, 128, 4))
# (mode, weight rows, weight columns) -> the fastest; None: the library
_fastest: dict[tuple[Mode, int, int], Config | None] = {}


@triton.jit
def _skinny_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, rows, width, depth, x_stride, out_stride,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    m = tl.arange(0, 16)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < width
    weight_row = weight_ptr + column.to(tl.int64)[:, None] * depth
    gate_to_up = width.to(tl.int64) * depth
    acc = tl.zeros([16, BLOCK_N], tl.float32)
    up = tl.zeros([16, BLOCK_N], tl.float32)
    for k0 in range(0, depth, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x_mask, w_mask = (m < rows)[:, None], inside[:, None]
        if not EVEN:
            x_mask, w_mask = x_mask & (k < depth)[None], w_mask & (k < depth)[None]
        x = tl.load(x_ptr + m[:, None] * x_stride + k[None], mask=x_mask, other=0.0)
        weight = tl.load(weight_row + k[None], mask=w_mask, other=0.0)
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
        if GATED:
            weight = tl.load(weight_row + gate_to_up + k[None], mask=w_mask, other=0.0)
            up = tl.dot(x, tl.trans(weight), up, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)[None]
    out = out_ptr + m[:, None] * out_stride + column[None]
    live = (m < rows)[:, None] & inside[None]
    if GATED:
        # rounded where a product of its own would be
        acc = acc.to(out_ptr.dtype.element_ty).to(tl.float32)
        up = up.to(out_ptr.dtype.element_ty).to(tl.float32)
        acc = acc * tl.sigmoid(acc) * up
    if ADDED:
        acc += tl.load(out, mask=live, other=0.0).to(tl.float32)
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live)


def skinny(mode: Mode, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, config: Config) -> Tensor:
    """Into out [M, N], from x [M, K] with M at most MAX_ROWS and contiguous weight: x @ weight.T (+ bias) ("plain");
    silu of the product with the weight's first half times that with its second ("gated"); added to `out` ("added")."""
    rows, depth = x.shape
    width = weight.shape[0] // 2 if mode == "gated" else weight.shape[0]
    block_n, block_k, stages = config
    _skinny_kernel[(triton.cdiv(width, block_n),)](
        out, x, weight, weight if bias is None else bias, rows, width, depth, x.stride(0), out.stride(0),
        BLOCK_N=block_n, BLOCK_K=block_k, EVEN=depth % block_k == 0, HAS_BIAS=bias is not None,
        GATED=mode == "gated", ADDED=mode == "added", num_stages=stages, num_warps=4,
    )  # fmt: skip
    return out


def fastest(mode: Mode, x: Tensor, weight: Tensor) -> Config | None:
    """What `tune` found for this shape; None: the library, also for more rows and what was never measured."""
    return _fastest.get((mode, *weight.shape)) if len(x) <= MAX_ROWS else None


def findings() -> dict[str, str]:
    """What `tune` has chosen so far, to be read by people."""
    return {
        f"{mode} {height}x{depth}": "library" if config is None else "columns {}, depth {}, stages {}".format(*config)
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

        if (took := _time(ours, x, weights)) < best:
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
