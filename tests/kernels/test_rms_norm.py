"""The fused RMS norm replaces the norms that compute the same, and no others."""

import pytest
import torch
from torch import nn

from peagle.kernels.rms_norm import FusedRMSNorm, fuse_rms_norms
from peagle.target import load_target
from tests.conftest import ARCHITECTURES


@pytest.mark.parametrize("shape", [(3, 16), (2, 5, 16), (1, 16)])
def test_equals_the_formula(shape):
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(16)), torch.randn(shape) * 100
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    torch.testing.assert_close(FusedRMSNorm(weight, 1e-6)(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_rows_of_any_size(eps):
    """Down to rows in which only eps counts; eps of 0 is left to PyTorch."""
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(576)), torch.randn(4, 576) * torch.tensor([1e3, 1.0, 1e-3, 1e-9])[:, None]
    expected = (x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + eps) * weight).float()
    torch.testing.assert_close(FusedRMSNorm(weight, eps)(x), expected, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_target_computes_the_same_afterwards(target_folder, name):
    """Gemma's norms multiply by 1 + weight and stay; every norm of the others is replaced."""
    target = load_target(str(target_folder(name)), device="cpu")
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    before = target.encode(ids, (1, 3, 6))
    norms = [m for m in target.model.modules() if type(m).__name__.endswith("RMSNorm")]
    replaced = fuse_rms_norms(target.model)
    assert replaced == (0 if name.startswith("gemma") else len(norms))
    assert fuse_rms_norms(target.model) == 0
    after = target.encode(ids, (1, 3, 6))
    torch.testing.assert_close(after.aux, before.aux, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.hidden, before.hidden, rtol=1e-4, atol=1e-4)


class OnePlusRMSNorm(nn.Module):
    """Gemma's: starts with a weight of zero."""

    def __init__(self, dim):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(dim)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


class GatedRMSNorm(OnePlusRMSNorm):
    """Reads a second input, as the norms of hybrid models do."""

    def forward(self, x, gate):
        return super().forward(x) * gate


@pytest.mark.parametrize("norm", [OnePlusRMSNorm, GatedRMSNorm, lambda dim: nn.LayerNorm(dim)])
def test_other_norms_stay(norm):
    model = nn.Sequential(norm(8), nn.RMSNorm(8, eps=1e-6))
    kept = model[0]
    assert fuse_rms_norms(model) == 1
    assert model[0] is kept
    assert isinstance(model[1], FusedRMSNorm)


def test_the_weight_is_shared_and_the_random_state_untouched():
    model = nn.Sequential(nn.RMSNorm(8, eps=1e-6))
    weight = model[0].weight
    torch.manual_seed(5)
    state = torch.get_rng_state()
    fuse_rms_norms(model)
    assert model[0].weight is weight
    assert torch.equal(torch.get_rng_state(), state)
