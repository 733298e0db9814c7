"""Pairs of token and expert in order of their experts, in tiles, with shapes that the host knows.

Pair p is token p // k with its (p % k)-th expert. A tile is up to `block` pairs of one expert that lie beside each
other in that order. How many tiles there are depends on the choices, how many there can be does not: so many programs
are launched, and those behind the last tile find it empty. Nothing is read back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Up to so many pairs one program sorts them, in one launch where PyTorch needs a dozen.
MOST_IN_ONE_PROGRAM = 1024


class Groups(NamedTuple):
    """order [P]: the pairs, by expert, of one expert in ascending order. expert, first, last [tiles]: tile t is expert
    expert[t]'s pairs order[first[t]:last[t]]; where first equals last there is none. All int32."""

    order: Tensor
    expert: Tensor
    first: Tensor
    last: Tensor


def most_tiles(num_pairs: int, num_experts: int, block: int) -> int:
    """How many tiles there can be: one a pair, or one that is not full for each expert beside the full ones."""
    return min(num_pairs, num_pairs // block + num_experts)


def group_pairs_torch(indices: Tensor, num_experts: int, block: int) -> Groups:
    """indices [T, k]: each token's experts."""
    flat = indices.flatten()
    by_expert, order = torch.sort(flat, stable=True)
    bounds = torch.arange(num_experts + 1, dtype=flat.dtype, device=flat.device)
    starts = torch.searchsorted(by_expert, bounds)
    tile_ends = ((starts.diff() + (block - 1)) // block).cumsum(0)
    tile = torch.arange(most_tiles(len(flat), num_experts, block), device=flat.device)
    expert = torch.searchsorted(tile_ends, tile, right=True)
    is_tile = expert < num_experts
    expert = torch.where(is_tile, expert, 0)
    tile_start = torch.where(expert > 0, tile_ends[expert - 1], 0)
    first = starts[expert] + (tile - tile_start) * block
    last = torch.minimum(first + block, starts[expert + 1])
    none = torch.zeros_like(first)
    first, last = torch.where(is_tile, first, none), torch.where(is_tile, last, none)
    return Groups(order.int(), expert.int(), first.int(), last.int())


def group_pairs(indices: Tensor, num_experts: int, block: int, is_chained: bool = False) -> Groups:
    """As `group_pairs_torch`. is_chained: the launch is an early one (`early_launch`)."""
    if indices.is_cuda and 0 < indices.numel() <= MOST_IN_ONE_PROGRAM:
        from peagle.kernels.expert_groups_triton import group_pairs_triton

        return group_pairs_triton(indices, num_experts, block, is_chained)
    return group_pairs_torch(indices, num_experts, block)
