"""How long a sweep will take: what arms like the remaining ones took."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from peagle.bench.arms import Arm


class TimeLeft:
    """Takes an arm for as long as others of its workload and concurrency took, of its engine where there are such."""

    def __init__(self, finished: Iterable[Mapping[str, Any]]) -> None:
        """finished: arm lines of earlier runs, which know the time of the measurement alone."""
        self._seconds: list[tuple[str, str, int, float]] = [
            (arm["engine"], arm["workload"], int(arm["concurrency"]), float(arm["duration"]))
            for arm in finished
            if arm.get("duration")
        ]
        self._loading: list[float] = []

    def measured(self, arm: Arm, seconds: float) -> None:
        self._seconds.append((arm.setup.engine, arm.workload, arm.concurrency, seconds))

    def loaded(self, seconds: float) -> None:
        """A setup took so long to load or start."""
        self._loading.append(seconds)

    def seconds(self, remaining: Sequence[Arm]) -> float | None:
        """For these arms, the first one's setup being loaded already; None while there is nothing to go by."""
        if not self._seconds:
            return None
        loads = max(sum(1 for _ in groupby(remaining, key=lambda arm: arm.setup)) - 1, 0)
        loading = statistics.mean(self._loading) * loads if self._loading else 0.0
        return loading + sum(self._one(arm) for arm in remaining)

    def _one(self, arm: Arm) -> float:
        engine, workload, concurrency = arm.setup.engine, arm.workload, arm.concurrency
        alike = [one for one in self._seconds if one[1:3] == (workload, concurrency)]
        chosen = [one for one in alike if one[0] == engine] or alike
        if chosen:
            return statistics.mean(one[3] for one in chosen)
        # another concurrency: the same tokens, and throughput grows with about the square root of the users
        scaled = [one for one in self._seconds if one[1] == workload] or self._seconds
        return statistics.mean(one[3] * (one[2] / concurrency) ** 0.5 for one in scaled)


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
