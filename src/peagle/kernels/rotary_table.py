"""RoPE's cosines and sines looked up instead of computed: one launch in place of ten, in every pass of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

# Types whose frequencies do not depend on how long the text at hand is.
STATIC_TYPES = ("default", "linear", "llama3", "yarn")


class RotaryTable(nn.Module):
    """A rotary embedding of Transformers for positions below `length`, in one dtype: same numbers, same signature."""

    table: Tensor

    @torch.no_grad()
    def __init__(self, rotary: Any, length: int, like: Tensor) -> None:
        super().__init__()
        cos, sin = rotary(like, torch.arange(length, device=like.device)[None])
        self.register_buffer("table", torch.cat((cos[0], sin[0]), dim=-1), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Position ids [1, T] -> cos and sin, views [1, T, D]."""
        cos, sin = self.table[position_ids].chunk(2, dim=-1)  # embedding() is slower for few rows of a GPU
        return cos, sin


def can_tabulate(rotary: Any) -> bool:
    """Whether the frequencies are fixed."""
    return getattr(rotary, "rope_type", None) in STATIC_TYPES
