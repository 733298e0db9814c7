"""The report's tables as rows of text; the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.bench.answer_check import check_phrase
from peagle.bench.arms import METHOD_NAMES
from peagle.bench.summary import Point, best, concurrencies, of_method, panels, ratio


@dataclass(frozen=True, slots=True)
class Table:
    """left: how many columns, from the first, hold words; the others hold numbers."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: int = 1


def number(value: float | None, digits: int = 1) -> str:
    """`1,234`, `12.3`; empty for a value that is not there."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}f}"


def best_table(points: Sequence[Point], workload: str, engine: str) -> Table:
    """Best against best: one row a concurrency."""
    rows = []
    for c in concurrencies(points, workload, engine):
        row = [str(c)]
        row += [best_cell(points, workload, engine, method, c) for method in METHOD_NAMES]
        pairs = (("eagle3", "none"), ("p-eagle", "none"), ("p-eagle", "eagle3"))
        ratios = [ratio(points, engine, workload, a, b, c) for a, b in pairs]
        row += ["" if r is None else f"{r.value:.2f}×" for r in ratios]
        last = ratios[2] or ratios[1] or ratios[0]
        row.append("" if last is None else last.verdict)
        row.append("" if last is None or last.resolution is None else f"{100 * last.resolution:.0f} %")
        rows.append(tuple(row))
    head = (
        *("C", "none", "EAGLE-3", "P-EAGLE", "as served", "EAGLE-3 / none", "P-EAGLE / none", "P-EAGLE / EAGLE-3"),
        *("difference", "detectable"),
    )
    title = f"{workload} · {engine}: output tokens/s, each at its best K"
    filled = [i for i in range(len(head)) if any(row[i] for row in rows)]
    return Table(title, tuple(head[i] for i in filled), [tuple(row[i] for i in filled) for row in rows])


def best_cell(points: Sequence[Point], workload: str, engine: str, method: str, concurrency: int) -> str:
    """Tokens/s at the K that is best, and what does not compare: `15.6 (K=3); K=7 left out: 1 failed`."""
    point = best(points, engine, workload, method, concurrency)
    parts = []
    if point is not None:
        parts.append(number(point.rate) + (f" (K={point.setup.k})" if point.setup.k else ""))
        parts += [point.left_out] if point.left_out else []
    return "; ".join([*parts, *dropped(points, workload, engine, method, concurrency)])


def dropped(points: Sequence[Point], workload: str, engine: str, method: str, concurrency: int) -> list[str]:
    """The K of a method that take no part in comparisons, and why."""
    own = [p for p in of_method(points, engine, workload, method, concurrency) if not p.compares]
    return [(f"K={p.setup.k} " if p.setup.k else "") + p.left_out for p in own]


def acceptance_table(points: Sequence[Point], workload: str, engine: str) -> Table | None:
    """Acceptance length and rates by position, two rows a head and K, at the lowest concurrency whose requests were all
    answered; a head and K without one is a row that says so."""
    shown = [
        p for p in _lowest(points, workload, engine) if p.acceptance_length is not None and p.setup.method != "none"
    ]
    if not shown:
        return None
    depth = max(len(p.joint_rates) for p in shown)
    rows: list[tuple[str, ...]] = []
    for p in shown:
        if not p.compares:
            rows.append((method_and_k(p), p.left_out, str(p.concurrency), "", "", *_rates((), depth)))
            continue
        rate = f"joint; {p.left_out}" if p.left_out else "joint"
        answers, length = str(p.answers), f"{p.acceptance_length:.2f}"
        rows.append((method_and_k(p), rate, str(p.concurrency), answers, length, *_rates(p.joint_rates, depth)))
        rows.append(("", "conditional", "", "", "", *_rates(p.conditional_rates, depth)))
    head = ("method", "rate", "C", "answers", "acceptance length", *(str(i + 1) for i in range(depth)))
    return Table(f"{workload} · {engine}: acceptance, by draft position", head, rows, left=2)


def _rates(rates: Sequence[float], depth: int) -> list[str]:
    return [f"{rate:.3f}" for rate in rates] + [""] * (depth - len(rates))


def worst_check(point: Point) -> dict[str, Any] | None:
    """Of a point's repeats the comparison with plain decoding that found most differences."""
    checks = [arm["check"] for arm in point.arms if arm.get("check")]
    return min(checks, key=lambda check: check["num_equal"] - check["num_answers"], default=None)


def difference_table(points: Sequence[Point]) -> Table | None:
    """Where greedy answers leave plain decoding's: a row a setup, a column a concurrency; plain decoding at other
    concurrencies is in it, for its rounding differs with the batch too."""
    users = sorted({p.concurrency for p in points})
    rows: list[tuple[str, ...]] = []
    for workload, engine in panels(points):
        for setup in dict.fromkeys(p.setup for p in points if p.workload == workload and p.setup.engine == engine):
            found = {p.concurrency: worst_check(p) for p in points if (p.workload, p.setup) == (workload, setup)}
            first = next((check for check in found.values() if check is not None and check["first"] is not None), None)
            if first is not None:
                cells = [found.get(c) for c in users]
                counts = ["" if one is None else f"{one['num_equal']} of {one['num_answers']}" for one in cells]
                rows.append((f"{workload} · {setup.label}", *counts, check_phrase(first).partition("first at ")[2]))
    if not rows:
        return None
    head = ("equal answers", *(f"C={c}" for c in users), "first difference")
    return Table("Answers that differ from plain decoding's", head, rows)


def failure_table(arms: Sequence[Mapping[str, Any]]) -> Table | None:
    """Every arm with failed requests, how they failed, and the first error's words."""
    rows = []
    for arm in arms:
        if not arm.get("failed"):
            continue
        kinds = ", ".join(f"{count} {kind}" for kind, count in (arm.get("failures") or {}).items())
        first = next((error for error in arm.get("errors") or () if error), "")
        what = f"{arm['workload']} · {arm['label']} · C={arm['concurrency']}"
        rows.append((what, str(arm.get("completed", "")), kinds, first[:300]))
    if not rows:
        return None
    return Table("Requests that failed", ("arm", "completed", "failed", "first error"), rows, left=4)


def headlines(points: Sequence[Point]) -> list[str]:
    """What a reader wants to know first, a sentence a workload and engine."""
    found = []
    for workload, engine in panels(points):
        c = min(concurrencies(points, workload, engine))
        rates = {m: best(points, engine, workload, m, c) for m in METHOD_NAMES}
        parts = []
        for a, b in (("p-eagle", "eagle3"), ("p-eagle", "none"), ("eagle3", "none")):
            r = ratio(points, engine, workload, a, b, c)
            if r is not None:
                doubt = " (inside the spread)" if r.verdict == "inside the spread" else ""
                parts.append(f"{METHOD_NAMES[a]} {r.value:.2f}× {METHOD_NAMES[b]}{doubt}")
        if not parts:
            parts = [f"{METHOD_NAMES[m]} {number(p.rate)} tokens/s" for m, p in rates.items() if p is not None]
        for method, name in METHOD_NAMES.items():
            parts += [f"{name} {what}" for what in dropped(points, workload, engine, method, c)]
        skipped = sum(p.skipped for p in points if (p.workload, p.setup.engine) == (workload, engine))
        if skipped:
            parts.append(f"in all arms together {skipped} later turns were skipped")
        if parts:
            found.append(f"{workload}, {engine}, C={c}: {'; '.join(parts)}")
    return found


def method_and_k(point: Point) -> str:
    """`P-EAGLE K=7`."""
    name = METHOD_NAMES.get(point.setup.method, point.setup.method)
    return f"{name} K={point.setup.k}" if point.setup.k else name


def _lowest(points: Sequence[Point], workload: str, engine: str) -> list[Point]:
    """Of each setup the point with the fewest users, of those that compare where there are such."""
    found: dict[object, Point] = {}
    for p in points:
        if (p.workload, p.setup.engine) == (workload, engine):
            kept = found.get(p.setup)
            if kept is None or (not p.compares, p.concurrency) < (not kept.compares, kept.concurrency):
                found[p.setup] = p
    return list(found.values())
