"""From arms to statements: repeats together, each method at its best K, and whether a difference stands out."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.bench.arms import METHODS, Setup
from peagle.bench.student_t import level_and_power
from peagle.engine.stats import SpecMetrics

# of an arm's draft counts; earlier versions did not have the last
COUNTS = (
    *("num_drafts", "num_draft_tokens", "num_accepted_tokens"),
    *("accepted_per_pos", "drafts_per_pos", "reached_per_pos"),
)


@dataclass(frozen=True, slots=True)
class Point:
    """One setup over one workload at one concurrency, all repeats. A value is the median of its repeats.

    Repeats with a failed request are left out, for their tokens/s are of another set of requests; where every repeat
    has one the values are of all, and the point takes no part in comparisons.
    """

    setup: Setup
    workload: str
    concurrency: int
    arms: tuple[dict[str, Any], ...]

    @property
    def clean(self) -> tuple[dict[str, Any], ...]:
        """Repeats without a failed request."""
        return tuple(arm for arm in self.arms if not arm.get("failed"))

    @property
    def counted(self) -> tuple[dict[str, Any], ...]:
        """Repeats that values are of."""
        return self.clean or self.arms

    @property
    def compares(self) -> bool:
        """Whether it takes part in comparisons: not beside a repeat without a token, whose ratio says nothing."""
        return bool(self.clean) and min(self.rates, default=0.0) > 0

    @property
    def left_out(self) -> str:
        """What is not counted, in words: `left out: 1 failed`, `1 of 3 runs left out: 1 failed`; empty for nothing."""
        if not self.failed:
            without = sum(rate <= 0 for rate in self.rates)
            some = f" in {without} of {len(self.arms)} runs" if 0 < without < len(self.arms) else ""
            return "" if self.compares else f"left out: no token{some}"
        some = f"{len(self.arms) - len(self.clean)} of {len(self.arms)} runs " if self.clean else ""
        return f"{some}left out: {self.failed} failed"

    @property
    def answers(self) -> int:
        """Requests answered, in the repeats that count."""
        return sum(int(arm.get("completed") or 0) for arm in self.counted)

    @property
    def skipped(self) -> int:
        """Later turns that were not asked, in the repeats that count."""
        return sum(int(arm.get("num_skipped") or 0) for arm in self.counted)

    def values(self, name: str) -> list[float]:
        """A metric of every repeat that counts and has it."""
        return [float(arm[name]) for arm in self.counted if arm.get(name) is not None]

    def median(self, name: str) -> float | None:
        values = self.values(name)
        return statistics.median(values) if values else None

    @property
    def rate(self) -> float:
        """Output tokens/s."""
        return self.median("output_throughput") or 0.0

    @property
    def rates(self) -> list[float]:
        return self.values("output_throughput")

    @property
    def spread(self) -> float | None:
        """(largest - smallest) / median of output tokens/s over the repeats; None for a single one."""
        rates = self.rates
        return (max(rates) - min(rates)) / self.rate if len(rates) > 1 and self.rate else None

    @property
    def failed(self) -> int:
        return sum(int(arm.get("failed") or 0) for arm in self.arms)

    @property
    def requests(self) -> int:
        return sum(int(arm.get("completed") or 0) + int(arm.get("failed") or 0) for arm in self.arms)

    @property
    def spec(self) -> SpecMetrics | None:
        """Draft counts of the repeats together; None without drafts."""
        total = SpecMetrics()
        for arm in self.counted:
            if arm.get("spec"):
                total.merge(SpecMetrics(**{name: arm["spec"][name] for name in COUNTS if name in arm["spec"]}))
        return total if total.num_drafts else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts over the repeats; what an imported arm says where it gives no counts."""
        spec = self.spec
        if spec is None:
            return self.median("spec_decode_acceptance_length")
        return spec.acceptance_length

    @property
    def joint_rates(self) -> list[float]:
        spec = self.spec
        if spec is None:
            return next((a["spec_decode_per_position_acceptance_rates"] for a in self.counted
                         if a.get("spec_decode_per_position_acceptance_rates")), [])  # fmt: skip
        return spec.joint_rates

    @property
    def conditional_rates(self) -> list[float]:
        if (spec := self.spec) is not None:
            return spec.conditional_rates
        joint = self.joint_rates
        return [now / before if before else 0.0 for now, before in zip(joint, [1.0, *joint], strict=False)]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Output tokens/s of `a` over those of `b`, each at its best K.

    low and high: the smallest and largest ratio that single repeats give. resolution: the relative difference that so
    many repeats with so much scatter would find 4 times out of 5 at the 5 % level; None for single runs.
    """

    a: Point
    b: Point

    @property
    def value(self) -> float:
        return self.a.rate / self.b.rate

    @property
    def low(self) -> float:
        return min(self.a.rates) / max(self.b.rates)

    @property
    def high(self) -> float:
        return max(self.a.rates) / min(self.b.rates)

    @property
    def resolution(self) -> float | None:
        n = min(len(self.a.rates), len(self.b.rates))
        if n < 2:
            return None
        variances = [(statistics.stdev(p.rates) / statistics.mean(p.rates)) ** 2 for p in (self.a, self.b)]
        level, power = level_and_power(2 * (n - 1))
        return (level + power) * math.sqrt(sum(variances) / n)

    @property
    def verdict(self) -> str:
        """Whether the difference is larger than what repeats differ by."""
        if min(len(self.a.rates), len(self.b.rates)) < 2:
            return "single runs: spread not known"
        return "inside the spread" if self.low <= 1.0 <= self.high else "outside the spread"


def points_of(arms: Iterable[dict[str, Any]]) -> list[Point]:
    """Arms grouped over their repeats, in the order of workload, engine, method, K and concurrency."""
    groups: dict[tuple[Setup, str, int], list[dict[str, Any]]] = {}
    for arm in arms:
        setup = Setup(arm["engine"], arm["method"], int(arm["k"]))
        groups.setdefault((setup, arm["workload"], int(arm["concurrency"])), []).append(arm)
    points = [Point(setup, workload, c, tuple(members)) for (setup, workload, c), members in groups.items()]
    workloads = list(dict.fromkeys(p.workload for p in points))
    engines = list(dict.fromkeys(p.setup.engine for p in points))
    methods = [*METHODS, "endpoint"]

    def order(p: Point) -> tuple[int, ...]:
        setup = p.setup
        places = workloads.index(p.workload), engines.index(setup.engine), methods.index(setup.method)
        return (*places, setup.k, p.concurrency)

    return sorted(points, key=order)


def of_method(points: Sequence[Point], engine: str, workload: str, method: str, concurrency: int) -> list[Point]:
    """A method at every K."""
    wanted = (engine, workload, method, concurrency)
    return [p for p in points if (p.setup.engine, p.workload, p.setup.method, p.concurrency) == wanted]


def best(points: Sequence[Point], engine: str, workload: str, method: str, concurrency: int) -> Point | None:
    """A method at the K with the most output tokens/s, of those that compare."""
    found = [p for p in of_method(points, engine, workload, method, concurrency) if p.compares]
    return max(found, key=lambda p: p.rate) if found else None


def ratio(points: Sequence[Point], engine: str, workload: str, a: str, b: str, concurrency: int) -> Ratio | None:
    """Best `a` against best `b`; None where one of them is missing."""
    first, second = (best(points, engine, workload, method, concurrency) for method in (a, b))
    return Ratio(first, second) if first is not None and second is not None else None


def panels(points: Sequence[Point]) -> list[tuple[str, str]]:
    """(workload, engine) pairs, in order: a comparison never crosses them."""
    return list(dict.fromkeys((p.workload, p.setup.engine) for p in points))


def concurrencies(points: Sequence[Point], workload: str, engine: str) -> list[int]:
    return sorted({p.concurrency for p in points if (p.workload, p.setup.engine) == (workload, engine)})
