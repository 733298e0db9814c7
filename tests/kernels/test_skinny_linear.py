"""Products of a few rows against PyTorch's: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from peagle.kernels.fused_layer import (
    LayerWeights,
    add_linear_,
    linear,
    silu_and_mul_torch,
    silu_linear,
    tune_layers,
)

pytest.importorskip("triton")
from peagle.kernels.skinny_linear import CONFIGS, Config, fastest, skinny

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize(("rows", "depth", "width"), [(1, 256, 64), (8, 512, 72), (16, 200, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if CUDA else [torch.float32])
def test_equals_pytorch(config: Config, rows: int, depth: int, width: int, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and CUDA:
        config = config._replace(stages=2)  # the tiles are twice as large
    g = torch.Generator().manual_seed(0)
    x, weight, bias, residual = (
        torch.randn(*shape, generator=g).to(dtype) / depth**0.25
        for shape in ((rows, depth), (2 * width, depth), (width,), (rows, width))
    )
    products = {
        "plain": F.linear(x, weight[:width], bias),
        "gated": silu_and_mul_torch(F.linear(x, weight)),
        "added": residual + F.linear(x, weight[:width]),
    }
    for mode, expected in products.items():
        own = weight if mode == "gated" else weight[:width].contiguous()
        out = residual.clone() if mode == "added" else torch.empty(rows, width, dtype=dtype)
        arguments = (x.to(DEVICE), own.to(DEVICE), bias.to(DEVICE) if mode == "plain" else None, out.to(DEVICE))
        got = skinny(mode, *arguments, config)  # type: ignore[arg-type]
        tolerance = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(got.cpu(), expected, atol=tolerance, rtol=tolerance)


def test_what_was_not_measured_is_left_to_the_library() -> None:
    assert fastest("plain", torch.zeros(4, 8), torch.zeros(9, 8)) is None


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_tuned_layers_equal_the_librarys() -> None:
    """Whatever was found to be faster."""
    g = torch.Generator().manual_seed(0)
    make = lambda *shape: (torch.randn(*shape, generator=g) / 16).to("cuda", torch.bfloat16)  # noqa: E731
    layers = [
        LayerWeights(
            make(384, 256), None, make(256, 256), None, make(1024, 256), make(256, 512), make(256), None, None,
            1e-5, 4, 1, 64, 0.125,
        )
        for _ in range(3)
    ]  # fmt: skip
    tune_layers(layers)
    x, gated, total = make(8, 256), make(8, 512), make(8, 256)
    layer = layers[0]
    expected = [
        F.linear(x, layer.qkv),
        silu_and_mul_torch(F.linear(x, layer.gate_up)),
        total + F.linear(gated, layer.down),
    ]
    ours = [linear(x, layer.qkv, None), silu_linear(x, layer.gate_up), add_linear_(total.clone(), gated, layer.down)]
    for a, b in zip(ours, expected, strict=True):
        torch.testing.assert_close(a, b, atol=3e-2, rtol=3e-2)
