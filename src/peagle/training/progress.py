"""A run's progress bar: steps, or seconds where the clock ends it."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class ProgressBar:
    """Progress: steps where their number is known, seconds where only the clock ends the run."""

    def __init__(self, steps: int | None, minutes: float | None, step: int, elapsed: float, silent: bool) -> None:
        self.by_steps = steps is not None
        total = steps if steps is not None else 60 * (minutes or 0.0)
        self.bar = tqdm(
            total=total,
            initial=step if self.by_steps else round(elapsed),
            disable=silent,
            unit="step" if self.by_steps else "s",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,  # a log file wants few lines
            bar_format=None if self.by_steps else "{l_bar}{bar}| {n:.0f}/{total:.0f}s{postfix}",
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def update(self, step: int, elapsed: float) -> None:
        if self.bar.disable:
            return
        self.bar.update((step if self.by_steps else min(elapsed, self.bar.total)) - self.bar.n)

    def show(self, values: dict[str, Any]) -> None:
        if self.bar.disable:
            return
        first = values["accuracy"][0]
        self.bar.set_postfix_str(
            f"loss {values['loss']:.3f}, top-1 {first if first is None else round(first, 3)}, "
            f"{values['tokens_per_second']:,.0f} tok/s"
        )
