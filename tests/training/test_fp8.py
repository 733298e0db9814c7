"""fp8 states come back as exactly as e4m3 lets them."""

from __future__ import annotations

import torch

from peagle.training.fp8 import from_fp8, to_fp8


def test_fp8_error_is_that_of_e4m3() -> None:
    torch.manual_seed(0)
    states = torch.randn(50, 4 * 64) * torch.tensor([1.0, 1e3, 1e-6, 0.0]).repeat_interleave(64)
    numbers, scale = to_fp8(states, 4)
    back = from_fp8(numbers, scale, torch.float32)
    largest = states.view(50, 4, 64).abs().amax(-1, keepdim=True).expand(50, 4, 64).reshape(50, 256)
    # three bits of mantissa; below the smallest normal number an absolute step of 2^-9
    assert ((back - states).abs() <= states.abs() * 2**-4 + largest / 448 * 2**-10).all()
    assert (back[:, 192:] == 0).all()
