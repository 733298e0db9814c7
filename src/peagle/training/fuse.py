"""RoPE and SwiGLU of a drafter layer as one kernel each, forward and backward (torch.compile).

Everything else of a layer is a matrix product, PyTorch's fused RMS norm or attention. The functions are compiled with a
dynamic number of rows, so that packs of different sizes share one compilation.
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


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, I]."""
    return F.silu(gate) * up


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _rotate(_self: DrafterAttention, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rotated: tuple[Tensor, Tensor] = _compiled(rope_both)(q, k, cos, sin)
    return rotated


def _mlp(self: DrafterMLP, x: Tensor) -> Tensor:
    return self.down_proj(_compiled(swiglu)(self.gate_proj(x), self.up_proj(x)))


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
