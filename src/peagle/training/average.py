"""An exponential moving average of the weights, in float32."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from peagle.training.memory import fits


class WeightAverage:
    """w_avg <- w_avg + (1 - d) (w - w_avg) after every step, d rising to `decay` so that the start is forgotten."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = list(parameters), decay
        self.averages = [p.detach().clone() for p in self.parameters]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """step: optimizer steps done before this one."""
        decay = min(self.decay, (1.0 + step) / (10.0 + step))
        torch._foreach_lerp_(local(self.averages), local(self.parameters), 1.0 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The averages stand in the parameters' place within. Raises InputError when there is no memory for both."""
        data = local(self.parameters)
        with fits("ema_decay: the head's weights beside their average", "lower --layers, or leave --ema-decay out"):
            own = [tensor.clone() for tensor in data]
        torch._foreach_copy_(data, local(self.averages))
        try:
            yield
        finally:
            torch._foreach_copy_(data, own)


def local(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors themselves, without gradients; of sharded ones this process's parts."""
    detached = [tensor.detach() for tensor in tensors]
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in detached]
