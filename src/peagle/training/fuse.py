"""RoPE and SwiGLU of a drafter layer as one kernel each, forward and backward (torch.compile).

Everything else of a layer is a matrix product, PyTorch's fused RMS norm or attention. The number of rows is the only
dimension that is compiled as an unknown, so that packs of different sizes share one compilation and the rest is fast.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafter.model import Drafter, DrafterAttention, DrafterMLP, apply_rope


def rope_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] and k [T, Hkv, D] rotated by cos and sin [T, 1, D]."""
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


def rope_both_back(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of what was rotated, from those of the rotated: the other way round."""
    return apply_rope(q, cos, -sin), apply_rope(k, cos, -sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, I]."""
    return F.silu(gate) * up


def swiglu_back(gate: Tensor, up: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`swiglu` again, and the gradients of gate and up, all [T, I], from the gradient of its result."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, d = gate.to(wide), gradient.to(wide)
    s = g.sigmoid()
    silu = g * s
    inner = silu.to(gate.dtype) * up
    return inner, (d * up.to(wide) * s * (1 + g * (1 - s))).to(gate.dtype), (d * silu).to(gate.dtype)


class Rope(torch.autograd.Function):
    """Rotation, whose gradient is a rotation: the same kernel."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return over_rows(rope_both, q, k, cos, sin)

    @staticmethod
    def backward(ctx: Any, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return *over_rows(rope_both_back, q, k, *ctx.saved_tensors), None, None


class SwigluDown(torch.autograd.Function):
    """silu(gate) * up and the product behind it, [T, I] and [H, I] -> [T, H]. What is between them is not kept but
    made again in the backward, where gate and up are read anyway: a third of what an MLP keeps."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return F.linear(over_rows(swiglu, gate, up), weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        inner, d_gate, d_up = over_rows(swiglu_back, gate, up, gradient @ weight)
        return d_gate, d_up, gradient.T @ inner


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def over_rows(function: Callable[..., Any], *tensors: Tensor) -> Any:
    """The compiled function of tensors [T, ...], for any T."""
    for tensor in tensors:
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _compiled(function)(*tensors)


def _rotate(_self: DrafterAttention, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rotated: tuple[Tensor, Tensor] = Rope.apply(q, k, cos, sin)
    return rotated


def _mlp(self: DrafterMLP, x: Tensor) -> Tensor:
    down: Tensor = SwigluDown.apply(self.gate_proj(x), self.up_proj(x), self.down_proj.weight)
    return down


def fuse_elementwise(drafter: Drafter) -> None:
    """Let this drafter's layers (not its class) use the fused functions."""
    for layer in drafter.layers:
        layer.self_attn.__dict__["rotate"] = MethodType(_rotate, layer.self_attn)
        layer.mlp.__dict__["forward"] = MethodType(_mlp, layer.mlp)


def unfuse(drafter: Drafter) -> None:
    """Undo `fuse_elementwise`."""
    for layer in drafter.layers:
        layer.self_attn.__dict__.pop("rotate", None)
        layer.mlp.__dict__.pop("forward", None)
