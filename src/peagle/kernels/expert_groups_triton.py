"""Triton kernel for `expert_groups`: few pairs are sorted and tiled in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch
from peagle.kernels.expert_groups import Groups, most_tiles

CELLS = 4096  # of a comparison of pairs with experts, what a program's registers hold well


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def _group_kernel(
    index_ptr, order_ptr, expert_ptr, first_ptr, last_ptr, num_pairs, num_tiles,
    NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
    IS_CHAINED: tl.constexpr,
):  # fmt: skip
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.arange(0, EXPERTS)
    count = tl.zeros([EXPERTS], tl.int32)
    for p0 in range(0, num_pairs, PAIRS):
        pair = p0 + tl.arange(0, PAIRS)
        index = tl.load(index_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        count += tl.sum((index[:, None] == expert[None]).to(tl.int32), 0)
    start = tl.cumsum(count, 0) - count
    tiles = (count + BLOCK - 1) // BLOCK
    tile_end = tl.cumsum(tiles, 0)

    place = start  # of the next pair of each expert
    for p0 in range(0, num_pairs, PAIRS):
        pair = p0 + tl.arange(0, PAIRS)
        index = tl.load(index_ptr + pair, mask=pair < num_pairs, other=-1).to(tl.int32)
        chosen = (index[:, None] == expert[None]).to(tl.int32)
        where = tl.sum(chosen * (tl.cumsum(chosen, 0) - 1 + place[None]), 1)
        tl.store(order_ptr + where, pair, mask=index >= 0)
        place += tl.sum(chosen, 0)

    for t0 in range(0, num_tiles, PAIRS):
        tile = t0 + tl.arange(0, PAIRS)
        owner = tl.sum((tile_end[None] <= tile[:, None]).to(tl.int32), 1)  # experts all of whose tiles lie before
        mine = owner[:, None] == expert[None]
        within = tile - tl.sum(tl.where(mine, (tile_end - tiles)[None], 0), 1)
        end = tl.sum(tl.where(mine, (start + count)[None], 0), 1)
        first = tl.sum(tl.where(mine, start[None], 0), 1) + within * BLOCK
        is_tile = owner < NUM_EXPERTS
        tl.store(expert_ptr + tile, tl.where(is_tile, owner, 0), mask=tile < num_tiles)
        tl.store(first_ptr + tile, tl.where(is_tile, first, 0), mask=tile < num_tiles)
        tl.store(last_ptr + tile, tl.where(is_tile, tl.minimum(first + BLOCK, end), 0), mask=tile < num_tiles)


def group_pairs_triton(indices: Tensor, num_experts: int, block: int, is_chained: bool = False) -> Groups:
    """As `expert_groups.group_pairs_torch`, for contiguous indices [T, k], in one program; its time grows with P."""
    num_pairs = indices.numel()
    num_tiles = most_tiles(num_pairs, num_experts, block)
    order = torch.empty(num_pairs, dtype=torch.int32, device=indices.device)
    # rows of whole 16 bytes: pointers that are aligned sometimes would make several kernels
    tiles = torch.empty(3, triton.cdiv(num_tiles, 4) * 4, dtype=torch.int32, device=indices.device)
    groups = Groups(order, *tiles[:, :num_tiles])
    padded = triton.next_power_of_2(num_experts)
    at_once = max(16, min(triton.next_power_of_2(num_pairs), CELLS // padded))
    _group_kernel[(1,)](
        indices, *groups, num_pairs, num_tiles,
        NUM_EXPERTS=num_experts, EXPERTS=padded, PAIRS=at_once, BLOCK=block, IS_CHAINED=is_chained,
        **early_launch(is_chained),
    )  # fmt: skip
    return groups
