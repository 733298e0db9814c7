"""oneDNN's packed linears against F.linear."""

import copy

import pytest
import torch
from torch import nn

from peagle.kernels.packed_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of PyTorch has no packed oneDNN operators")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(40,), (1, 40), (8, 40), (33, 40), (1, 5, 40), (2, 3, 40), (2, 2, 2, 40), (0, 40)])
def test_equals_f_linear(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(40, 56, bias=bias)
    x = torch.randn(shape)
    packed = PackedLinear(copy.deepcopy(linear), keep_weight=False)
    with torch.no_grad():
        expected = linear(x)
        torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-5)


def test_a_row_view_that_is_not_contiguous():
    torch.manual_seed(0)
    linear = nn.Linear(40, 56)
    packed = PackedLinear(copy.deepcopy(linear), keep_weight=False)
    with torch.no_grad():
        for x in (torch.randn(40, 6).T, torch.randn(6, 80)[:, ::2], torch.randn(4, 3, 40)[:, 1]):
            torch.testing.assert_close(packed(x), linear(x), rtol=1e-5, atol=1e-5)


def test_weight_is_kept_only_on_request():
    linear = nn.Linear(8, 16)
    assert PackedLinear(linear, keep_weight=False).weight is None
    assert PackedLinear(linear, keep_weight=True).weight is linear.weight


class SpecialLinear(nn.Linear):
    """A linear of another class, which may compute something else."""


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.Sequential(nn.Linear(16, 24), nn.SiLU(), nn.Linear(24, 16))
        self.special = SpecialLinear(16, 16)
        self.low = nn.Linear(16, 16).to(torch.bfloat16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.special(self.block(self.embed(ids)))
        return self.head(self.low(x.to(torch.bfloat16)).float())


def test_pack_linears_replaces_plain_fp32_linears_only():
    torch.manual_seed(0)
    model = Tied()
    ids = torch.arange(5)
    with torch.no_grad():
        expected = model(ids)
        assert pack_linears(model, keep=(model.head,)) == 3
        torch.testing.assert_close(model(ids), expected, rtol=1e-5, atol=1e-5)
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.block[2], PackedLinear)
    assert type(model.low) is nn.Linear
    assert type(model.special) is SpecialLinear
    assert model.head.weight is model.embed.weight  # tied embeddings still read it
    assert model.block[0].weight is None


def test_pack_linears_keeps_a_target_the_same(target_folder):
    """The whole model, on a copy of its own: logits and LM head weight as before."""
    from peagle.target import load_target

    target = load_target(str(target_folder("llama")), device="cpu")
    ids = torch.randint(0, 256, (1, 12))
    before = target.lm_logits(target.encode(ids, (1, 2, 3)).hidden)
    head = target.lm_head_weight.clone()
    assert pack_linears(target.model, keep=(target.model.get_output_embeddings(),)) == 7 * 7 + 1
    torch.testing.assert_close(target.lm_logits(target.encode(ids, (1, 2, 3)).hidden), before, rtol=1e-4, atol=1e-4)
    assert torch.equal(target.lm_head_weight, head)
