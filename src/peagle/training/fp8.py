"""States as fp8 (e4m3) numbers with one scale a token and state."""

from __future__ import annotations

import torch
from torch import Tensor

FP8_MAX = 448.0  # largest number of e4m3


def to_fp8(states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[T, count H] -> e4m3 numbers of the same shape and scales [T, count] float32: the largest of each is 448."""
    parts = states.float().view(states.shape[0], count, -1)
    scale = parts.abs().amax(-1) / FP8_MAX
    scale = torch.where(scale > 0, scale, 1.0)
    return (parts / scale[..., None]).to(torch.float8_e4m3fn).view_as(states), scale


def from_fp8(numbers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Undo `to_fp8`: relative error at most 2^-4 a number."""
    parts = numbers.to(torch.float32).view(numbers.shape[0], scale.shape[1], -1)
    return (parts * scale[..., None]).to(dtype).view_as(numbers)
