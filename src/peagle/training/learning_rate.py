"""The learning rate over a run."""

from __future__ import annotations

import math


def learning_rate_factor(
    step: int, progress: float, warmup_steps: int, floor: float, decay_share: float | None = None
) -> float:
    """Linear warm-up over steps times a cosine from 1 to `floor` over the run (progress 0 to 1).

    decay_share: 1 until that share of the run is left, then linear to `floor`, in the cosine's place.
    """
    warm = min(1.0, (step + 1) / warmup_steps) if warmup_steps else 1.0
    progress = min(max(progress, 0.0), 1.0)
    if decay_share is None:
        left = 0.5 * (1.0 + math.cos(math.pi * progress))
    else:
        left = min(1.0, (1.0 - progress) / decay_share) if decay_share else 1.0
    return warm * (floor + (1.0 - floor) * left)
