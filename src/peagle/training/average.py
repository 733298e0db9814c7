"""An exponential moving average of the weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """w_avg <- w_avg + (1 - d) (w - w_avg) after every step, d rising to `decay` so that the start is forgotten."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.averages = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """step: optimizer steps done before this one."""
        decay = min(self.decay, (1.0 + step) / (10.0 + step))
        torch._foreach_lerp_(self.averages, [p.detach() for p in self.parameters], 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages stand in the parameters' place within."""
        own = [p.detach().clone() for p in self.parameters]
        data: list[Tensor] = [p.data for p in self.parameters]
        torch._foreach_copy_(data, self.averages)
        try:
            yield
        finally:
            torch._foreach_copy_(data, own)
