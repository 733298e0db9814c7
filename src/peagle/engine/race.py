"""Choosing by a race (the Gumbel-max trick): every token has an exponential clock that runs at its probability, and the
first to ring is chosen.

A clock's noise is the token's own, a function of seed, position and token id. So logits that differ in their last bits,
as they do between batches of another shape, choose another token only where two clocks ring at nearly the same time.
Inverting the cumulated distribution would move every boundary between tokens behind the one that changed.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from peagle.engine.argmax import argmax_rows

# of one PyTorch call on a CPU: what a few cores keep in their caches
CPU_ELEMENTS = 2**18


def noise_bits(seed: Tensor, positions: Tensor) -> Tensor:
    """64 bits for each (seed, position), all int64 and of one shape: counter-based, no state."""
    golden = -0x61C8864680B583EB
    return _mix64(_mix64(seed + golden) + positions * golden)


def _mix64(x: Tensor) -> Tensor:
    """The finaliser of splitmix64 on int64 tensors (arithmetic wraps; shifts have to be made logical by hand)."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def mix32(x: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on int32 tensors, in place: a permutation of the 32-bit numbers."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(-0x7A143595)
    x.bitwise_xor_((x >> 13).bitwise_and_(0x7FFFF)).mul_(-0x3D4D51CB)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


@functools.cache
def mixed_ids(vocab: int, device: torch.device) -> Tensor:
    """`mix32` of all token ids, int32 [V]."""
    with torch.inference_mode(False):
        return mix32(torch.arange(vocab, dtype=torch.int32, device=device))


def race_keys(seed: Tensor, positions: Tensor) -> Tensor:
    """What the clocks of a row take from its seed and position, both int64 [n] -> int32 [n]."""
    return ((noise_bits(seed, positions) << 32) >> 32).to(torch.int32)


def negative_waits(keys: Tensor, mixed: Tensor) -> Tensor:
    """How long the clocks wait at rate 1, times -1: keys, mixed ids [C] or [n, C], int32 -> float32 [n, C]."""
    bits = mix32(mixed ^ keys[:, None])
    share = bits.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF).float()
    return share.add_(0.5).mul_(-(2.0**-31)).log1p_()


def race(scaled: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """The winner's index [n] among tokens `ids` [n, C] with logits scaled [n, C]; -inf never wins."""
    waits = negative_waits(keys, mix32(ids.to(torch.int32, copy=True)))
    return (scaled - waits.neg_().log_()).argmax(dim=-1)


def race_rows(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """The token chosen from each row of logits [n, V] at temperature [n] (above 0), keys [n] of `race_keys`."""
    if logits.is_cuda and logits.stride(1) == 1:
        from peagle.kernels.race_rows import race_rows_triton

        return race_rows_triton(logits, temperature, keys)
    mixed = mixed_ids(logits.shape[1], logits.device)
    at_once = max(CPU_ELEMENTS // logits.shape[1], 1)
    chosen = []
    for part in range(0, len(logits), at_once):
        rows = slice(part, part + at_once)
        probs = (logits[rows].float() / temperature[rows, None]).softmax(dim=-1)
        chosen.append(argmax_rows(probs.div_(negative_waits(keys[rows], mixed)).neg_()))
    return torch.cat(chosen) if chosen else keys.new_empty(0, dtype=torch.int64)
