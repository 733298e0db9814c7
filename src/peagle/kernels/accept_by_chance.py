"""`engine.verification.accepts_anything` in one launch: some thirty small ones are a hundredth of a step that they only
simulate a part of."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

GOLDEN = tl.constexpr(-0x61C8864680B583EB)


@triton.jit
def _mix64(x):
    # `engine.race`'s: splitmix64's finaliser on signed numbers, whose shifts are made logical by hand
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _accept_kernel(out_ptr, rate_ptr, seed_ptr, position_ptr, salt, K: tl.constexpr, PAD: tl.constexpr):
    request = tl.program_id(0)
    j = tl.arange(0, PAD)
    inside = j < K
    seed = tl.load(seed_ptr + request) ^ salt
    position = tl.load(position_ptr + request) + 1 + j
    bits = _mix64(_mix64(seed + GOLDEN) + position * GOLDEN)
    chance = ((bits >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    rate = tl.load(rate_ptr + j, mask=inside, other=0.0)
    tl.store(out_ptr + request * K + j, chance < rate, mask=inside)


def accept_by_chance_triton(rates: Tensor, seed: Tensor, positions: Tensor, salt: int) -> Tensor:
    """rates float64 [K], seed and positions int64 [R], contiguous; salt is mixed into the seeds -> bool [R, K]."""
    requests, k = len(seed), len(rates)
    out = torch.empty((requests, k), dtype=torch.bool, device=seed.device)
    if requests:
        _accept_kernel[(requests,)](out, rates, seed, positions, salt, K=k, PAD=triton.next_power_of_2(k), num_warps=1)
    return out
