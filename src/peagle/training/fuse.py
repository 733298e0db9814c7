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

from peagle.drafter.model import Attend, Drafter, DrafterAttention, DrafterMLP, apply_rope


def rope_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q [T, Hq, D] and k [T, Hkv, D] rotated by cos and sin [T, 1, D]."""
    return apply_rope(q, cos, sin), apply_rope(k, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [T, I]."""
    return F.silu(gate) * up


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _attention(self: DrafterAttention, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor:
    heads = (x.shape[0], -1, self.head_dim)
    q, k = _compiled(rope_both)(self.q_proj(x).view(heads), self.k_proj(x).view(heads), cos, sin)
    out = attend(layer, q, k, self.v_proj(x).view(heads))
    return self.o_proj(out.reshape(x.shape[0], -1))


def _mlp(self: DrafterMLP, x: Tensor) -> Tensor:
    return self.down_proj(_compiled(swiglu)(self.gate_proj(x), self.up_proj(x)))


def fuse_elementwise(drafter: Drafter) -> None:
    """Let this drafter's layers (not its class) use the fused functions."""
    for layer in drafter.layers:
        for module, forward in ((layer.self_attn, _attention), (layer.mlp, _mlp)):
            module.__dict__["forward"] = MethodType(forward, module)


def unfuse(drafter: Drafter) -> None:
    """Undo `fuse_elementwise`."""
    for layer in drafter.layers:
        for module in (layer.self_attn, layer.mlp):
            module.__dict__.pop("forward", None)
