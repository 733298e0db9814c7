"""MXFP4 holds what once was MXFP4, bit for bit, and refuses the rest."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.kernels.mxfp4 import GREATEST_SCALE, LEAST_SCALE, MAGNITUDES, pack_mxfp4, unpack_mxfp4


def random_mxfp4(*shape: int, low: int = LEAST_SCALE, high: int = GREATEST_SCALE) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (*shape[:-1], shape[-1] // 32, 16), generator=g, dtype=torch.uint8)
    return blocks, torch.randint(low, high + 1, blocks.shape[:-1], generator=g, dtype=torch.uint8)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_over_all_scales(dtype: torch.dtype) -> None:
    weight = unpack_mxfp4(*random_mxfp4(3, 40, 96), dtype)
    packed = pack_mxfp4(weight)
    assert packed is not None
    assert packed[0].shape == (3, 40, 3, 16)
    assert packed[1].shape == (3, 40, 3)
    assert_same_bits(unpack_mxfp4(*packed, dtype), weight)


def test_of_float16() -> None:
    weight = unpack_mxfp4(*random_mxfp4(2, 8, 64, low=115), torch.float16)
    packed = pack_mxfp4(weight)
    assert packed is not None
    assert_same_bits(unpack_mxfp4(*packed, torch.float16), weight)


def test_by_definition() -> None:
    """As the checkpoints' own arithmetic has it: sign, two bits of exponent, one of fraction, times 2^(scale - 127)."""
    code = torch.arange(16)
    exponent, fraction = (code >> 1) & 3, code & 1
    value = torch.where(exponent > 0, 2.0 ** (exponent - 1) * (1 + fraction / 2), fraction / 2)
    value = torch.where(code >= 8, -value, value)
    blocks = (torch.arange(16, dtype=torch.uint8) | (torch.arange(15, -1, -1, dtype=torch.uint8) << 4))[None]
    got = unpack_mxfp4(blocks, torch.tensor([125], dtype=torch.uint8), torch.float32)
    assert_same_bits(got, torch.cat((value, value.flip(0))) / 4)


def test_scales_that_are_greater_than_need_be() -> None:
    """A checkpoint's block may use its small values only."""
    weight = torch.tensor([0.5, 1.0, -1.5, 3.0] * 8)[None] * 2.0**-7
    packed = pack_mxfp4(weight)
    assert packed is not None
    assert_same_bits(unpack_mxfp4(*packed, torch.float32), weight)


def test_zeros_keep_their_signs() -> None:
    weight = torch.zeros(2, 64, dtype=torch.bfloat16)
    weight[0, ::3] = -0.0
    packed = pack_mxfp4(weight)
    assert packed is not None
    assert_same_bits(unpack_mxfp4(*packed, torch.bfloat16), weight)


@pytest.mark.parametrize("value", [7.0, 5.0, 2.5, 0.25, float("inf"), float("nan"), 6 * 2.0**20])
def test_refuses_what_it_cannot_hold(value: float) -> None:
    weight = torch.tensor(MAGNITUDES * 4)[None].repeat(5, 2)
    assert pack_mxfp4(weight) is not None
    weight[4, 33] = value
    assert pack_mxfp4(weight) is None


def test_exponents_at_the_edges() -> None:
    for scale in (LEAST_SCALE, GREATEST_SCALE):
        weight = torch.tensor(MAGNITUDES * 4, dtype=torch.bfloat16)[None] * 2.0 ** (scale - 127)
        packed = pack_mxfp4(weight)
        assert packed is not None
        assert packed[1].item() == scale
        assert_same_bits(unpack_mxfp4(*packed, torch.bfloat16), weight)
    for beyond in (weight * 2, torch.tensor([[6.0] * 31 + [0.5]]).bfloat16() * 2.0 ** (LEAST_SCALE - 128)):
        assert pack_mxfp4(beyond) is None


def test_refuses_shapes_and_dtypes() -> None:
    assert pack_mxfp4(torch.zeros(4, 40)) is None
    assert pack_mxfp4(torch.zeros(0, 32)) is None
    assert pack_mxfp4(torch.zeros(4, 32, dtype=torch.float64)) is None


def test_of_a_transposed_view() -> None:
    weight = unpack_mxfp4(*random_mxfp4(3, 8, 64), torch.bfloat16)
    packed, again = pack_mxfp4(weight.mT.contiguous().mT), pack_mxfp4(weight)
    assert packed is not None
    assert again is not None
    assert all(torch.equal(a, b) for a, b in zip(packed, again, strict=True))
