"""Small results from the device to the host, without waiting for them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def fetch_later(tensor: Tensor) -> Callable[[], NDArray[Any]]:
    """Start copying a tensor to the host; call what it returns to wait for it. The tensor may change afterwards."""
    if not tensor.is_cuda:
        array = tensor.numpy().copy()
        return lambda: array
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> NDArray[Any]:
        arrived.synchronize()
        return pinned.numpy()

    return wait
