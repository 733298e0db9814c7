"""Where a step's time goes, without making the device wait."""

from __future__ import annotations

import time
from typing import Any

import torch


class Marks:
    """`marks(name)` ends a part: the time since the mark before it is counted under that name.

    On a CUDA device the times are between events in the stream, so they include its waiting for the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self.made: list[tuple[str, Any]] = []

    def __call__(self, name: str) -> None:
        at: Any = time.perf_counter()
        if self.cuda:
            at = torch.cuda.Event(enable_timing=True)
            at.record()
        self.made.append((name, at))

    def seconds(self) -> dict[str, float]:
        """Seconds by name, in the order of first use; waits for the device and starts anew."""
        if self.cuda:
            torch.cuda.synchronize()
        found: dict[str, float] = {}
        for (_, before), (name, at) in zip(self.made, self.made[1:], strict=False):
            found[name] = found.get(name, 0.0) + (before.elapsed_time(at) / 1e3 if self.cuda else at - before)
        self.made.clear()
        return found
