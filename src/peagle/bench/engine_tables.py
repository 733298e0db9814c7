"""Engines side by side: each setup in one engine against the same setup in another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.bench.answer_check import check_phrase
from peagle.bench.arms import METHOD_NAMES
from peagle.bench.report_tables import Table
from peagle.bench.summary import Point

# concurrency -> the two engines' points
Pairs = dict[int, tuple[Point, Point]]


def engines_tables(points: Sequence[Point], workload: str) -> list[Table]:
    """Tokens/s and acceptance length of the first engine against every other: a row a setup, a column a concurrency."""
    own = [p for p in points if p.workload == workload]
    users = sorted({p.concurrency for p in own})
    first, *others = dict.fromkeys(p.setup.engine for p in own)
    tables = []
    for other in others:
        rates, lengths = [], []
        for name, pairs in paired(own, first, other).items():
            rates.append((name, *(ratio_cell(pairs, c) for c in users)))
            known = {c: (x, y) for c, (a, b) in pairs.items() if (x := length(a)) and (y := length(b))}
            if known:
                x, y = known[min(known)]
                lengths.append((name, f"{x:.3f}", f"{y:.3f}", *(length_cell(pairs, known, c) for c in users)))
        head = tuple(f"C={c}" for c in users)
        if rates:
            tables.append(Table(f"{workload}: output tokens/s of {first} over {other}", ("method", *head), rates))
        if lengths:
            title = f"{workload}: acceptance length in {first} and {other} (lowest C), and their difference at each C"
            tables.append(Table(title, ("method", first, other, *head), lengths))
    return tables


def paired(points: Sequence[Point], first: str, other: str) -> dict[str, Pairs]:
    """By method and K, in words: the concurrencies at which both engines were measured."""
    places = {(p.setup.engine, p.setup.method, p.setup.k, p.concurrency): p for p in points}
    found: dict[str, Pairs] = {}
    for (engine, method, k, c), a in places.items():
        b = places.get((other, method, k, c))
        if engine == first and b is not None:
            name = METHOD_NAMES.get(method, method) + (f" K={k}" if k else "")
            found.setdefault(name, {})[c] = (a, b)
    return found


def ratio_cell(pairs: Pairs, concurrency: int) -> str:
    """The ratio, and what is left out of it; that alone where a side does not compare."""
    if concurrency not in pairs:
        return ""
    a, b = pairs[concurrency]
    ratio = [f"{a.rate / b.rate:.2f}×"] if a.compares and b.compares else []
    return "; ".join([*ratio, *_left_out(a, b)])


def length_cell(pairs: Pairs, known: Mapping[int, tuple[float, float]], concurrency: int) -> str:
    """How far the second engine's length is from the first's, and what is left out of it."""
    if concurrency not in pairs:
        return ""
    apart = []
    if concurrency in known:
        a, b = known[concurrency]
        apart = [f"{100 * (b / a - 1):+.1f} %"]
    return "; ".join([*apart, *_left_out(*pairs[concurrency])])


def _left_out(a: Point, b: Point) -> list[str]:
    return [f"{point.left_out} in {point.setup.engine}" for point in (a, b) if point.left_out]


def length(point: Point) -> float | None:
    """Of a setup that drafts and whose requests were all answered."""
    return point.acceptance_length if point.setup.method != "none" and point.compares else None


def engine_answers_table(arms: Sequence[Mapping[str, Any]]) -> Table | None:
    """Plain decoding's answers of one engine against another's."""
    rows = [
        (arm["workload"], f"{arm['engine']} against {arm['check_engines']['with']}", check_phrase(arm["check_engines"]))
        for arm in arms
        if arm.get("check_engines")
    ]
    return Table("Plain decoding in different engines", ("workload", "engines", "answers"), rows, 3) if rows else None
