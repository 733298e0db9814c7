"""Linears over the same input as one product, for a CPU, where weights are laid out anew and views cannot be had."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class JoinedLinear(nn.Module):
    """Several linears as one, `linear`, which `pack_linears` and `halve_linears` find like any other."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        first, bias = linears[0], linears[0].bias is not None
        self.linear: nn.Module = nn.Linear(
            first.in_features, sum(linear.out_features for linear in linears), bias, device="meta"
        )
        self.linear.weight = nn.Parameter(torch.cat([linear.weight.detach() for linear in linears]), False)
        if bias:
            self.linear.bias = nn.Parameter(torch.cat([linear.bias.detach() for linear in linears]), False)


class JoinedPart(nn.Module):
    """One of the linears, in its old place: for dense passes, which are rare; each computes the whole product."""

    def __init__(self, whole: JoinedLinear, start: int, linear: nn.Linear) -> None:
        super().__init__()
        self.whole, self.start = whole, start
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        return self.whole.linear(x)[..., self.start : self.start + self.out_features]


def join_children(parent: nn.Module, names: tuple[str, ...]) -> None:
    """Put a `JoinedPart` in the place of each of the named fp32 linears of `parent`, where they are plain ones."""
    linears = [getattr(parent, name) for name in names]
    plain = all(type(m) is nn.Linear and m.weight.dtype == torch.float32 for m in linears)
    if not plain or len({m.bias is None for m in linears}) > 1:
        return
    whole, start = JoinedLinear(linears), 0
    for name, linear in zip(names, linears, strict=True):
        setattr(parent, name, JoinedPart(whole, start, linear))
        start += linear.out_features
