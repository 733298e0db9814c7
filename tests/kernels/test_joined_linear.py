"""Linears that are one product, and still there one by one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from peagle.kernels.half_linear import halve_linears
from peagle.kernels.joined_linear import JoinedPart, join_children
from peagle.kernels.packed_linear import pack_linears

NAMES = ("a", "b", "c")


def parent(biases: tuple[bool, ...] = (False, False, False), dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(0)
    sizes = zip(NAMES, (24, 8, 16), biases, strict=True)
    return nn.ModuleDict({name: nn.Linear(16, size, bias, dtype=dtype) for name, size, bias in sizes})


@pytest.mark.parametrize("layout", [None, halve_linears, pack_linears])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_parts_compute_what_they_did(bias: bool, layout: object) -> None:
    made = parent((bias,) * 3)
    for parameter in made.parameters():
        parameter.copy_(parameter.half())
    x = torch.randn(2, 3, 16)
    expected = [made[name](x) for name in NAMES]
    join_children(made, NAMES)
    parts = [made[name] for name in NAMES]
    assert all(isinstance(part, JoinedPart) for part in parts)
    assert len({id(part.whole) for part in parts}) == 1
    assert [part.out_features for part in parts] == [24, 8, 16]
    if layout is not None:
        assert layout(made) in (0, 1)  # type: ignore[operator]
    for part, before in zip(parts, expected, strict=True):
        torch.testing.assert_close(part(x), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(parts[0].whole.linear(x), torch.cat(expected, dim=-1), rtol=1e-5, atol=1e-5)
    join_children(made, NAMES)
    assert [made[name] for name in NAMES] == parts


def test_what_is_not_joined() -> None:
    for made in (parent((True, False, True)), parent(dtype=torch.bfloat16)):
        join_children(made, NAMES)
        assert all(type(made[name]) is nn.Linear for name in NAMES)
