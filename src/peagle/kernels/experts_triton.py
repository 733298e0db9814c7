"""Triton kernels for `experts`: gate-up-activation, down, and the sum over k, each over tiles of `expert_groups`.

Decoding for one request reads k experts of each layer once and computes next to nothing, so what counts is that the
whole card reads: a program takes few rows of an expert's weight (`Tile.columns`), which lie one behind the other.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch
from peagle.kernels.expert_groups import Groups, group_pairs, most_tiles
from peagle.kernels.experts import ExpertWeights, Product
from peagle.kernels.mxfp4_triton import unpack_in_ptx, unpack_in_triton

SUM_COLUMNS = 512


class Tile(NamedTuple):
    """columns (of the output) a program, depth a turn (of MXFP4 a multiple of 128), turns in flight (stages), warps.

    Of gate and up so many columns of each. weight_first: the product is taken as weight x rows, so that the weight's
    rows fill the 64 of Hopper's matrix instruction however few pairs a tile has. splits: of down, by so many programs
    the depth is shared.
    """

    columns: int
    depth: int
    stages: int
    warps: int
    weight_first: bool = False
    splits: int = 1


class Config(NamedTuple):
    """rows: pairs a tile (16, 32, 64 or 128). What a program computes of gate and up, and of down."""

    rows: int
    gate_up: Tile
    down: Tile


# by pairs a tile
PLAIN = {
    16: Config(16, Tile(32, 128, 4, 4, True), Tile(64, 128, 4, 4, True)),
    32: Config(32, Tile(32, 128, 4, 4, True), Tile(64, 128, 4, 4, True)),
    64: Config(64, Tile(64, 64, 4, 4), Tile(128, 64, 3, 4)),
    128: Config(128, Tile(64, 64, 4, 8), Tile(128, 64, 4, 8)),
}
MXFP4 = {
    16: Config(16, Tile(32, 256, 4, 4, True), Tile(64, 256, 4, 4, True)),
    32: Config(32, Tile(32, 256, 3, 4, True), Tile(64, 256, 3, 4, True)),
    64: Config(64, Tile(64, 128, 3, 4), Tile(128, 128, 3, 4)),
    128: Config(128, Tile(64, 128, 3, 8), Tile(128, 128, 3, 8)),
}
# Few tiles leave most of the card idle; then down's depth is shared.
FEW_TILES, FEW_SPLITS = 8, 2


def choose_config(num_rows: int, k: int, element_size: int, weights: ExpertWeights) -> Config:
    """By how many pairs an expert gets on average. Tiles of more rows than that waste products, tiles of fewer read a
    weight (from the cache, mostly) and unpack it several times."""
    pairs = num_rows * k / weights.num_experts
    rows = 16 if pairs <= 8 else 32 if pairs <= 24 else 64 if pairs <= 96 else 128
    is_mxfp4 = [product.scales is not None for product in (weights.gate_up, weights.down)]
    gate_up, down = ((MXFP4 if packed else PLAIN)[rows] for packed in is_mxfp4)
    few = most_tiles(num_rows * k, weights.num_experts, rows) <= FEW_TILES
    tiles = [gate_up.gate_up, down.down._replace(splits=FEW_SPLITS if few else 1)]
    if element_size > 2:  # the same tiles take twice the memory
        tiles = [t._replace(depth=128 if packed else 64, stages=2) for t, packed in zip(tiles, is_mxfp4, strict=True)]
    return Config(rows, *tiles)


@triton.jit
def _multiplied(x, weight, acc, WEIGHT_FIRST: tl.constexpr, IS_WIDENED: tl.constexpr):
    """acc plus x [M, K] times weight [N, K] transposed, or the transpose of that. Widened: for the interpreter, which
    cannot multiply bfloat16."""
    if IS_WIDENED:
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    if WEIGHT_FIRST:
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["num_pairs"])
def _product_kernel(
    out_ptr, x_ptr, weight_ptr, scale_ptr, bias_ptr, routing_ptr,
    order_ptr, expert_ptr, first_ptr, last_ptr, x_stride, num_pairs, alpha, limit,
    WIDTH: tl.constexpr, DEPTH: tl.constexpr, SCALE_STRIDE: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_SPLITS: tl.constexpr,
    IS_GATED: tl.constexpr, HAS_LIMIT: tl.constexpr, HAS_BIAS: tl.constexpr, IS_MXFP4: tl.constexpr,
    WEIGHT_FIRST: tl.constexpr, IS_ONE_TOKEN: tl.constexpr, IN_PTX: tl.constexpr, IS_WIDENED: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    # WIDTH: of the output. Gated: rows of x are tokens, rows of the output places in the order by experts. Otherwise
    # rows of x are places, rows of the output pairs; of several splits each writes its part of the sum, in float32.
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Tiles of one expert are neighbours, so that programs that read the same part of a weight run together.
    tile = tl.program_id(0)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if IS_ONE_TOKEN:  # each pair is a tile, in the order of the router
        first = tile
        last = tile + 1
    else:
        first = tl.load(first_ptr + tile)
        last = tl.load(last_ptr + tile)
        if first >= last:
            return
    place = first + tl.arange(0, BLOCK_M)
    live = place < last
    pair = place
    if not IS_ONE_TOKEN:
        pair = tl.load(order_ptr + place, mask=live, other=0)
    if IS_GATED:
        x_row = x_ptr + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
    else:
        x_row = x_ptr + place.to(tl.int64)[:, None] * x_stride

    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    # Gated: BLOCK_N rows of gates and as many of ups are one product, taken apart when it is done.
    height: tl.constexpr = 2 * WIDTH if IS_GATED else WIDTH
    block: tl.constexpr = 2 * BLOCK_N if IS_GATED else BLOCK_N
    line = tl.arange(0, block)
    inside = tl.program_id(1) * BLOCK_N + line % BLOCK_N < WIDTH
    line = tl.program_id(1) * BLOCK_N + line % BLOCK_N + line // BLOCK_N * WIDTH
    split = tl.program_id(2)
    turns: tl.constexpr = (DEPTH + BLOCK_K - 1) // BLOCK_K
    share: tl.constexpr = (turns + NUM_SPLITS - 1) // NUM_SPLITS * BLOCK_K
    start = split * share
    stop = tl.minimum(start + share, DEPTH)
    acc = tl.zeros([block, BLOCK_M] if WEIGHT_FIRST else [BLOCK_M, block], tl.float32)
    if IS_MXFP4:
        weight_ptr += expert * (height * (DEPTH // 2))
        scale_ptr += expert * (height * SCALE_STRIDE)
        half: tl.constexpr = BLOCK_K // 2
        position = tl.arange(0, half)
        for k0 in range(start, stop, BLOCK_K):
            k = k0 + position // 16 * 32 + position % 16
            loaded = live[:, None] & (k < DEPTH)[None]
            x_low = tl.load(x_row + k[None], mask=loaded, other=0.0)
            x_high = tl.load(x_row + (k + 16)[None], mask=loaded, other=0.0)
            at = k0 // 2 + position
            packed = tl.load(
                weight_ptr + line[:, None] * (DEPTH // 2) + at[None],
                mask=inside[:, None] & (at < DEPTH // 2)[None], other=0,
            )  # fmt: skip
            # four scales at once: single bytes could not be on their way while others are multiplied
            word = k0 // 128 + tl.arange(0, BLOCK_K // 128)
            words = tl.load(scale_ptr + line[:, None] * SCALE_STRIDE + word[None], mask=inside[:, None], other=0)
            scale = (words[:, :, None, None] >> (tl.arange(0, 4) * 8)[None, None, :, None]) & 255
            packed = tl.reshape(packed, [block, BLOCK_K // 128, 4, 16])
            if IN_PTX:
                low, high = unpack_in_ptx(packed, scale)
            else:
                low, high = unpack_in_triton(packed, scale, x_ptr.dtype.element_ty)
            acc = _multiplied(x_low, tl.reshape(low, [block, half]), acc, WEIGHT_FIRST, IS_WIDENED)
            acc = _multiplied(x_high, tl.reshape(high, [block, half]), acc, WEIGHT_FIRST, IS_WIDENED)
    else:
        weight_ptr += expert * (height * DEPTH)
        for k0 in range(start, stop, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            x_mask = live[:, None]
            w_mask = inside[:, None]
            if DEPTH % BLOCK_K != 0:
                x_mask = x_mask & (k < DEPTH)[None]
                w_mask = w_mask & (k < DEPTH)[None]
            x = tl.load(x_row + k[None], mask=x_mask, other=0.0)
            weight = tl.load(weight_ptr + line[:, None] * DEPTH + k[None], mask=w_mask, other=0.0)
            acc = _multiplied(x, weight, acc, WEIGHT_FIRST, IS_WIDENED)

    if WEIGHT_FIRST:
        acc = tl.trans(acc)
    in_width = column < WIDTH
    live = live[:, None] & in_width[None]
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N]), [0, 2, 1]))
        if HAS_BIAS:
            bias_ptr += expert * height + column
            gate += tl.load(bias_ptr, mask=in_width, other=0.0).to(tl.float32)[None]
            up += tl.load(bias_ptr + WIDTH, mask=in_width, other=0.0).to(tl.float32)[None]
        gate = gate.to(dtype).to(tl.float32)
        up = up.to(dtype).to(tl.float32)
        if HAS_LIMIT:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit) + 1
        acc = up * (gate * tl.sigmoid(alpha * gate))
        tl.store(out_ptr + place.to(tl.int64)[:, None] * WIDTH + column[None], acc.to(dtype), mask=live)
    else:
        if NUM_SPLITS == 1:
            if HAS_BIAS:
                bias = tl.load(bias_ptr + expert * height + column, mask=in_width, other=0.0)
                acc += bias.to(tl.float32)[None]
            routing = tl.load(routing_ptr + pair, mask=place < last, other=0.0).to(tl.float32)
            acc = acc.to(dtype).to(tl.float32) * routing[:, None]
        row = split.to(tl.int64) * num_pairs + pair
        tl.store(out_ptr + row[:, None] * WIDTH + column[None], acc.to(dtype), mask=live)


@triton.jit(do_not_specialize=["num_pairs"])
def _sum_kernel(
    out_ptr, part_ptr, bias_ptr, index_ptr, routing_ptr, num_pairs,
    WIDTH: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, NUM_SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    # A token's k rows of [P, WIDTH]; or, of several splits, first what `_product_kernel` does with a sum that it has
    # for itself.
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for j in range(TOP_K):
        pair = row * TOP_K + j
        part = tl.zeros([BLOCK], tl.float32)
        for split in range(NUM_SPLITS):
            where = (split * num_pairs.to(tl.int64) + pair) * WIDTH + column
            part += tl.load(part_ptr + where, mask=inside, other=0.0).to(tl.float32)
        if NUM_SPLITS > 1:
            if HAS_BIAS:
                expert = tl.load(index_ptr + pair).to(tl.int64)
                part += tl.load(bias_ptr + expert * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
            part = part.to(dtype).to(tl.float32) * tl.load(routing_ptr + pair).to(tl.float32)
            part = part.to(dtype).to(tl.float32)
        total += part
    tl.store(out_ptr + row * WIDTH + column, total.to(dtype), mask=inside)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def experts_triton(
    hidden: Tensor,
    indices: Tensor,
    routing: Tensor,
    weights: ExpertWeights,
    config: Config | None = None,
    is_chained: bool | None = None,
) -> Tensor:
    """As `experts.experts_torch`. config None: by `choose_config`; is_chained (launched early, `early_launch`) None:
    where the card can. Indices must be those of experts."""
    (rows, width), k = hidden.shape, indices.shape[1]
    if not rows:
        return torch.empty_like(hidden)
    if hidden.stride(1) != 1:
        hidden = hidden.contiguous()
    indices, routing = indices.contiguous(), routing.contiguous()
    if is_chained is None:
        is_chained = hidden.is_cuda and _capability(hidden.device) >= (9, 0)
    if config is None:
        config = choose_config(rows, k, hidden.element_size(), weights)
    if rows == 1:
        chosen = indices.flatten()
        groups = Groups(chosen, chosen, chosen, chosen)
        num_tiles = k
    else:
        groups = group_pairs(indices, weights.num_experts, config.rows, is_chained)
        num_tiles = most_tiles(rows * k, weights.num_experts, config.rows)

    def multiply(x: Tensor, product: Product, tile: Tile, is_gated: bool) -> Tensor:
        """Into [P, I], places by tokens, or [splits * P, H], pairs by places."""
        columns, splits = product.width // 2 if is_gated else product.width, tile.splits
        out_dtype = x.dtype if splits == 1 else torch.float32
        out = torch.empty(splits * rows * k, columns, dtype=out_dtype, device=x.device)
        scales = product.scales
        _product_kernel[(num_tiles, triton.cdiv(columns, tile.columns), splits)](
            out, x, product.weight, product.weight if scales is None else scales.view(torch.int32),
            x if product.bias is None else product.bias, routing, *groups, x.stride(0), rows * k,
            weights.alpha, weights.limit or 0.0,
            WIDTH=columns, DEPTH=product.depth, SCALE_STRIDE=0 if scales is None else scales.shape[-1] // 4, TOP_K=k,
            BLOCK_M=config.rows, BLOCK_N=tile.columns, BLOCK_K=tile.depth, NUM_SPLITS=splits,
            IS_GATED=is_gated, HAS_LIMIT=weights.limit is not None, HAS_BIAS=product.bias is not None,
            IS_MXFP4=scales is not None, WEIGHT_FIRST=tile.weight_first, IS_ONE_TOKEN=rows == 1,
            IN_PTX=x.is_cuda and x.dtype == torch.bfloat16 and _capability(x.device) >= (8, 0),
            IS_WIDENED=not x.is_cuda and x.dtype != torch.float32, IS_CHAINED=is_chained,
            num_stages=tile.stages, num_warps=tile.warps, **early_launch(is_chained),
        )  # fmt: skip
        return out

    active = multiply(hidden, weights.gate_up, config.gate_up._replace(splits=1), is_gated=True)
    parts = multiply(active, weights.down, config.down, is_gated=False)
    if k == 1 and config.down.splits == 1:
        return parts
    out = torch.empty(rows, width, dtype=hidden.dtype, device=hidden.device)
    bias = weights.down.bias
    _sum_kernel[(rows, triton.cdiv(width, SUM_COLUMNS))](
        out, parts, hidden if bias is None else bias, indices, routing, rows * k,
        WIDTH=width, TOP_K=k, BLOCK=SUM_COLUMNS, NUM_SPLITS=config.down.splits, HAS_BIAS=bias is not None,
        IS_CHAINED=is_chained, **early_launch(is_chained),
    )  # fmt: skip
    return out
