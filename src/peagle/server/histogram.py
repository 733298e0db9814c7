"""A histogram for what happens many times a step: prometheus_client's own takes several microseconds a value."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class FastHistogram(Collector):
    """One thread observes, any may scrape: a scrape between two of the writer's lines is a value behind, no more."""

    def __init__(self, name: str, text: str, labels: Mapping[str, str], buckets: Iterable[float]) -> None:
        self.name, self.text, self.labels = name, text, labels
        self.bounds = sorted(buckets)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self.name, self.text, labels=list(self.labels))
        cumulated, total = [], 0
        for bound, count in zip([*self.bounds, float("inf")], self.counts, strict=True):
            total += count
            cumulated.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family.add_metric(list(self.labels.values()), cumulated, self.sum)
        yield family
