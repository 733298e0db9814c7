"""The kernels of a fused layer against their PyTorch form: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from peagle.kernels.fused_layer import (
    LayerWeights,
    add_rms_norm_torch,
    join_linears,
    rope_and_write_torch,
    silu_and_mul_torch,
)
from peagle.target.paged_attention import FP8

pytest.importorskip("triton")
from peagle.kernels.fused_layer_triton import (
    add_rms_norm_triton,
    rms_norm_triton,
    rope_and_write_triton,
    silu_and_mul_triton,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16]


def close(ours: Tensor, expected: Tensor) -> None:
    tolerance = 1e-5 if expected.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(ours.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 48, 576])
def test_add_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, residual, weight = (torch.randn(*shape).to(dtype) for shape in ((5, width), (5, width), (width,)))
    expected = add_rms_norm_torch(x, residual, weight, 1e-5)
    ours = add_rms_norm_triton(x.to(DEVICE), residual.to(DEVICE), weight.to(DEVICE), 1e-5)
    for a, b in zip(ours, expected, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 48), (1, 3, 576)])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = torch.randn(shape).to(dtype) * 30, torch.randn(shape[-1:]).to(dtype)
    expected = nn.functional.rms_norm(x, weight.shape, weight, 1e-5)
    close(rms_norm_triton(x.to(DEVICE), weight.to(DEVICE), 1e-5), expected)
    wide = torch.cat((x, x), dim=-1).to(DEVICE)
    close(rms_norm_triton(wide[..., : shape[-1]], weight.to(DEVICE), 1e-5), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 1536])
def test_silu_and_mul(dtype: torch.dtype, width: int) -> None:
    x = torch.randn(5, 2 * width).to(dtype)
    close(silu_and_mul_triton(x.to(DEVICE)), silu_and_mul_torch(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cache_dtype", [None, FP8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "norms"), [(4, 2, 16, False), (9, 3, 64, True), (6, 1, 24, True)])
def test_rope_and_write(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, heads: int, kv_heads: int, dim: int, norms: bool
) -> None:
    g = torch.Generator().manual_seed(0)
    rows = 7
    none = torch.zeros(0)
    weights = LayerWeights(
        none, None, none, None, none, none, none,
        torch.randn(dim, generator=g).to(DEVICE, dtype) if norms else None,
        torch.randn(dim, generator=g).to(DEVICE, dtype) if norms else None,
        1e-5, heads, kv_heads, dim, dim**-0.5,
    )  # fmt: skip
    qkv = torch.randn(rows, (heads + 2 * kv_heads) * dim, generator=g).to(DEVICE, dtype)
    cos, sin = (torch.randn(rows, dim, generator=g).to(DEVICE, dtype) for _ in range(2))
    slots = torch.tensor([5, -1, 0, 11, -1, 3, 7], device=DEVICE)
    if cache_dtype is not None and DEVICE == "cpu":
        # Triton's interpreter rounds to float8 wrongly, so let there be nothing to round
        qkv, cos, sin = qkv.to(cache_dtype).to(dtype), torch.ones_like(cos), torch.zeros_like(sin)
        weights.q_norm = weights.k_norm = None
    caches = []
    for function in (rope_and_write_torch, rope_and_write_triton):
        cache = tuple(torch.zeros(4, 3, kv_heads, dim, device=DEVICE).to(cache_dtype or dtype) for _ in range(2))
        q = function(qkv.clone(), cos, sin, weights, cache, slots)
        caches.append([q, *(c.to(dtype) for c in cache)])
    for ours, expected in zip(caches[1][:1], caches[0][:1], strict=True):
        close(ours, expected.cpu())
    for ours, expected in zip(caches[1][1:], caches[0][1:], strict=True):
        if cache_dtype is None:
            close(ours, expected.cpu())
        else:  # a number near the middle of two may be rounded to either
            torch.testing.assert_close(ours.cpu(), expected.cpu(), rtol=0.13, atol=1e-2)
        assert (ours.flatten(0, 1)[[1, 2, 4, 6]] == 0).all()


@pytest.mark.parametrize("bias", [False, True])
def test_joined_linears_are_views(bias: bool) -> None:
    linears = [nn.Linear(6, n, bias=bias) for n in (4, 3)]
    x = torch.randn(2, 6)
    expected = [linear(x) for linear in linears]
    weight, joined = join_linears(linears)
    assert (joined is not None) == bias
    torch.testing.assert_close(nn.functional.linear(x, weight, joined), torch.cat(expected, dim=-1))
    for linear, before in zip(linears, expected, strict=True):
        torch.testing.assert_close(linear(x), before)
        assert linear.weight.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
