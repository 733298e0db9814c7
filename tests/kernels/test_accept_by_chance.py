"""Synthetic acceptance's Triton kernel against its PyTorch form: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from peagle.engine.verification import SYNTHETIC, accepts_anything, conditional_rates

pytest.importorskip("triton")
from peagle.kernels.accept_by_chance import accept_by_chance_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rates", [(0.7,), (0.9, 0.5, 0.4, 0.4, 0.1), (1.0, 1.0, 0.0)])
def test_equals_pytorch(rates: tuple[float, ...]) -> None:
    """The same drafts are accepted, also with seeds and positions at the ends of their ranges."""
    generator = torch.Generator().manual_seed(0)
    seeds = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    seeds[:3] = torch.tensor([0, -(2**63), 2**63 - 1])
    positions = torch.randint(0, 200_000, (64,), generator=generator)
    conditional = conditional_rates(rates, torch.device("cpu"))
    expected = accepts_anything(conditional, seeds, positions)
    got = accept_by_chance_triton(*(x.to(DEVICE) for x in (conditional, seeds, positions)), SYNTHETIC)
    assert torch.equal(got.cpu(), expected)
    if 0 < rates[0] < 1:
        assert 0 < int(expected[:, 0].sum()) < 64
