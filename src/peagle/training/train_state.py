"""Where a run stands, and what it has counted since the last line of its log."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.training.distributed import World
from peagle.training.validate import Validation


@dataclass
class LogSums:
    """Sums since the last log, on the device. stats [3, K]: losses, matches and rows by depth."""

    stats: Tensor
    loss: Tensor
    steps: int = 0
    tokens: int = 0
    began: float = 0.0  # on the monotonic clock; later by what validations took

    def collect(self, world: World) -> None:
        """Bring the statistics to the first process."""
        if world.size > 1:
            world.all_reduce(self.stats)
            if not world.first:
                self.stats.zero_()

    def restart(self, now: float) -> None:
        self.stats.zero_()
        self.loss.zero_()
        self.steps = self.tokens = 0
        self.began = now


@dataclass
class TrainState:
    """What changes from step to step beside the weights; a checkpoint holds all of it."""

    sums: LogSums
    step: int = 0
    documents: int = 0
    tokens: int = 0
    elapsed_before: float = 0.0  # seconds of training before this process
    validation: Validation | None = None  # the last one
    validated_at: int = -1
    best: float = 0.0  # acceptance length without repeating text, of the head in best/
    began: float | None = field(default=None, init=False)  # on the monotonic clock, when this process began to train

    def elapsed(self) -> float:
        """Seconds of training."""
        return self.elapsed_before + (0.0 if self.began is None else time.monotonic() - self.began)

    def progress(self, total_steps: int | None, max_minutes: float | None) -> float:
        """Share of the run that is done, by its nearest limit."""
        shares = [0.0]
        if total_steps is not None:
            shares.append(self.step / max(total_steps, 1))
        if max_minutes is not None:
            shares.append(self.elapsed() / (60 * max_minutes))
        return max(shares)


def new_state(depths: int, device: torch.device) -> TrainState:
    """A run that has not begun."""
    stats = torch.zeros(3, depths, dtype=torch.float64, device=device)
    return TrainState(LogSums(stats, stats.new_zeros(())))


def log_values(state: TrainState, world: World, documents: int, lr: float, norm: Tensor) -> dict[str, Any]:
    """What happened since the last log, which begins anew; the one place in the loop that waits for the device.

    documents: of an epoch. Raises InputError when the loss is not finite.
    """
    sums = state.sums
    sums.collect(world)
    loss = float(sums.loss) / max(sums.steps, 1)
    losses, matches, counts = sums.stats.tolist()
    if not math.isfinite(loss):
        raise InputError(f"lr: the loss is {loss} at step {state.step}, training diverged; lower it (got {lr:g})")
    now = time.monotonic()
    seconds = max(now - sums.began, 1e-9)
    values: dict[str, Any] = {
        "step": state.step,
        "loss": loss,
        "accuracy": [m / c if c else None for m, c in zip(matches, counts, strict=True)],
        "depth_loss": [s / c if c else None for s, c in zip(losses, counts, strict=True)],
        "rows": int(sum(counts)),
        "lr": lr,
        "grad_norm": float(norm),
        "epoch": state.documents / max(documents, 1),
        "documents": state.documents,
        "tokens": state.tokens,
        "tokens_per_second": sums.tokens / seconds,
        "elapsed": state.elapsed(),
    }
    if sums.stats.device.type == "cuda":
        values["peak_gib"] = torch.cuda.max_memory_allocated(sums.stats.device) / 2**30
    sums.restart(now)
    return values
