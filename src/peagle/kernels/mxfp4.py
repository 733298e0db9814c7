"""MXFP4: blocks of 32 numbers of four bits each (e2m1) with a common power of two as their scale (e8m0).

The values of a block are 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, times 2^(scale - 127). Here byte i of a
block's 16 holds value i in its low half and value i + 16 in its high half (checkpoints have 2i and 2i + 1): whoever
unpacks gets two runs of 16 neighbours and need not interleave them.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Scales with which every value is a normal bfloat16 and unpacking takes one multiplication by 2^(scale - 1).
LEAST_SCALE, GREATEST_SCALE = 2, 128
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def pack_mxfp4(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """weight [N, ..., K] -> blocks [N, ..., K / 32, 16] and scales [N, ..., K / 32], both uint8, without any loss.

    None unless unpacking gives back every bit, signs of zeros included. So do numbers that were MXFP4 once, whatever
    their scales were, but for those outside LEAST_SCALE to GREATEST_SCALE. Works on one of N at a time, so that it
    needs little memory beyond its result.
    """
    *lead, depth = weight.shape
    if depth % BLOCK or not weight.numel() or weight.dtype not in DTYPES:
        return None
    blocks = torch.empty(*lead, depth // BLOCK, BLOCK // 2, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(*lead, depth // BLOCK, dtype=torch.uint8, device=weight.device)
    for i, part in enumerate(weight):
        part = part.contiguous()
        blocks[i], scales[i] = _nearest_below(part)
        again = unpack_mxfp4(blocks[i], scales[i], weight.dtype)
        if not torch.equal(again.view(torch.uint8), part.view(torch.uint8)):
            return None
    return blocks, scales


def _nearest_below(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [..., K] -> blocks and scales, exact where that is possible, else anything.

    A block whose greatest value is 4 or 6 times its scale can hold whatever it could with a greater scale: doubling
    the values 0 to 3 gives values again. So one scale need be tried.
    """
    numbers = weight.float().unflatten(-1, (-1, BLOCK))
    greatest = numbers.abs().amax(dim=-1)
    scales = (torch.frexp(greatest).exponent + (127 - 3)).clamp(LEAST_SCALE, GREATEST_SCALE)
    halves = torch.ldexp(numbers.abs(), 128 - scales[..., None])  # counts of half the scale
    code = torch.zeros(13, dtype=torch.uint8, device=weight.device)
    code[[int(2 * m) for m in MAGNITUDES]] = torch.arange(8, dtype=torch.uint8, device=weight.device)
    codes = code[halves.nan_to_num_(0.0, 0.0).clamp_(max=12).long()]
    codes |= torch.signbit(numbers).to(torch.uint8) << 3
    low, high = codes.split(BLOCK // 2, dim=-1)
    return low | (high << 4), scales.to(torch.uint8)


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks [..., G, 16] and scales [..., G] -> their numbers [..., 32 G] in `dtype`."""
    values = torch.tensor((*MAGNITUDES, *(-m for m in MAGNITUDES)), device=blocks.device)
    codes = torch.cat((blocks & 15, blocks >> 4), dim=-1)
    numbers = torch.ldexp(values[codes.long()], scales[..., None].int() - 127)
    return numbers.to(dtype).flatten(-2)
