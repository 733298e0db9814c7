"""Linears with float16 weights against exact ones."""

import copy

import pytest
import torch
from torch import nn

from peagle.kernels import half_linear
from peagle.kernels.half_linear import HalfLinear, fits_half, halve_linears, has_half, is_half
from peagle.kernels.packed_linear import PackedLinear, can_pack, pack_linears

pytestmark = pytest.mark.skipif(not has_half(), reason="this build of PyTorch has no FBGEMM")


def with_outliers(inputs, outputs):
    """A random linear some of whose channels, in and out, are a thousand times the others, or a millionth."""
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs)
    with torch.no_grad():
        linear.weight[3] *= 1000
        linear.weight[:, 5] *= 1000
        linear.weight[7] *= 1e-6
        linear.weight[11, 13] = 60_000
    return linear


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 130])
def test_error_is_that_of_rounding_the_weights(rows):
    """Every product is off by at most 2^-11 of itself, or by 2^-25 of the input where the weight is tiny."""
    linear = with_outliers(96, 72)
    x = torch.randn(rows, 96) * torch.linspace(0.01, 100, 96)
    with torch.no_grad():
        found = HalfLinear(copy.deepcopy(linear))(x).double()
        exact = x.double() @ linear.weight.double().T + linear.bias.double()
        sums = x.double().abs() @ linear.weight.double().abs().T
        bound = sums * 2**-11 + x.double().abs().sum(1, keepdim=True) * 2**-25
        slack = sums * 1e-6 + 1e-6  # of adding up in float32
        assert ((found - exact).abs() <= bound + slack).all()
        assert (found - exact).abs().max() > 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 40), (8, 40), (33, 40), (2, 3, 40), (0, 40)])
def test_weights_of_bfloat16_are_kept_exactly(shape, bias):
    torch.manual_seed(0)
    linear = nn.Linear(40, 56, bias=bias).to(torch.bfloat16).float()
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(HalfLinear(copy.deepcopy(linear))(x), linear(x), rtol=1e-5, atol=1e-5)


def test_a_row_view_that_is_not_contiguous():
    torch.manual_seed(0)
    linear = nn.Linear(40, 56).to(torch.bfloat16).float()
    half = HalfLinear(linear)
    with torch.no_grad():
        for x in (torch.randn(40, 6).T, torch.randn(6, 80)[:, ::2], torch.randn(4, 3, 40)[:, 1]):
            torch.testing.assert_close(half(x), linear(x), rtol=1e-5, atol=1e-5)


def test_rows_do_not_depend_on_the_others():
    """Nothing is scaled by what else runs in the batch."""
    half = HalfLinear(with_outliers(96, 72))
    x = torch.randn(6, 96)
    together = torch.cat((x, 1e4 * torch.randn(6, 96)))
    torch.testing.assert_close(half(together)[:6], half(x), rtol=1e-5, atol=1e-3)


def test_which_linears_are_replaced():
    class Special(nn.Linear):
        """Another class, which may compute something else."""

    def model():
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16), Special(16, 16), nn.Linear(16, 16).bfloat16())
        with torch.no_grad():
            made[1].weight[2, 2] = -70_000  # beyond float16
        return made

    ours = model()
    assert fits_half(ours[0].weight)
    assert not fits_half(ours[1].weight)
    weight = ours[0].weight
    assert halve_linears(ours, keep=(ours[0],)) == 1
    assert [type(m) for m in ours] == [HalfLinear, nn.Linear, Special, nn.Linear]
    assert ours[0].weight is weight
    if can_pack():
        assert pack_linears(ours) == 1  # what is left of them
        assert isinstance(ours[1], PackedLinear)
    others = model()
    assert halve_linears(others) == 1
    assert others[0].weight is None


def test_a_build_without_fbgemm(monkeypatch):
    def refuse(*_):
        raise RuntimeError("Didn't find engine for operation quantized::linear_prepack_fp16 NoQEngine")

    has_half.cache_clear()
    monkeypatch.setattr(half_linear, "half_product", refuse)
    try:
        assert not has_half()
        assert halve_linears(nn.Sequential(nn.Linear(4, 4))) == 0
    finally:
        has_half.cache_clear()


@pytest.mark.parametrize(("inputs", "outputs"), [(576, 192), (1536, 576), (577, 130)])
def test_a_row_alone_and_among_others(inputs, outputs):
    """As near as sums in another order are: FBGEMM adds up one or two rows that are left over in its own."""
    torch.manual_seed(0)
    half = HalfLinear(nn.Linear(inputs, outputs).half().float())
    x = torch.randn(130, inputs)
    with torch.no_grad():
        together = half(x)
        for rows in (*range(1, 17), 31, 121):
            torch.testing.assert_close(half(x[:rows]), together[:rows], rtol=1e-5, atol=2e-6)
    assert half(x[:0]).shape == (0, outputs)


def test_what_float16_holds_exactly():
    """Down to its subnormal numbers: products with them are exact too."""
    torch.manual_seed(0)
    exact = nn.Linear(96, 72, bias=False)
    with torch.no_grad():
        exact.weight[:36] *= 1e-6
        exact.weight[40] *= 1e5
        exact.weight.copy_(exact.weight.half())
        assert is_half(exact.weight)
        x = torch.randn(5, 96)
        expected = (x.double() @ exact.weight.double().T).float()
        torch.testing.assert_close(HalfLinear(exact)(x), expected, rtol=1e-4, atol=1e-12)
    for value in (1 + 2**-12, 70_000.0, 2.0**-26, float("nan")):
        weight = torch.ones(7, 3)
        weight[6, 2] = value
        assert not is_half(weight)
    assert is_half(torch.tensor([[1 + 2**-10, -65504.0, 2.0**-24, 0.0]]))


def test_only_exact_ones_when_asked():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24).bfloat16().float(), nn.Linear(24, 16))
    assert halve_linears(model, exact=True) == 1
    assert isinstance(model[0], HalfLinear)
    assert type(model[1]) is nn.Linear
