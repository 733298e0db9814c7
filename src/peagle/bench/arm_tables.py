"""The report's tables of every arm: its numbers, how much was asked and answered, and what it ran on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.bench.report_tables import Table, method_and_k, number, worst_check
from peagle.bench.summary import Point


def arms_table(points: Sequence[Point], workload: str, engine: str) -> Table:
    """Every setup at every concurrency."""
    rows = []
    for p in _of(points, workload, engine):
        worst = worst_check(p)
        length = p.acceptance_length
        rows.append(
            (
                method_and_k(p),
                str(p.concurrency),
                number(p.rate),
                "" if p.spread is None else f"{100 * p.spread:.1f} %",
                number(p.median("per_user_throughput")),
                number(p.median("median_ttft_ms"), 0),
                number(p.median("p99_ttft_ms"), 0),
                number(p.median("median_tpot_ms")),
                number(p.median("p99_tpot_ms")),
                "" if length is None else f"{length:.2f}",
                number(p.median("mean_concurrency")),
                f"{p.failed} of {p.requests}" if p.failed else "0",
                str(p.skipped),
                "" if worst is None else f"{worst['num_equal']} of {worst['num_answers']}",
            )
        )
    head = (
        *("method", "C", "tokens/s", "spread", "per user", "TTFT p50", "p99", "TPOT p50", "p99", "AL", "in flight"),
        *("failed", "skipped", "equal to plain"),
    )
    return Table(f"{workload} · {engine}: all arms (times in ms, medians over repeats)", head, rows)


def counts_table(points: Sequence[Point], workload: str, engine: str) -> Table:
    """How much each arm rests on: conversations, answers, tokens and seconds of one run, medians over repeats."""
    names = ("num_prompts", "completed", "total_input_tokens", "total_output_tokens")
    rows = [
        (
            method_and_k(p),
            str(p.concurrency),
            str(len(p.arms)),
            *(number(p.median(name), 0) for name in names),
            number(p.median("duration")),
            p.left_out,
        )
        for p in _of(points, workload, engine)
    ]
    head = ("method", "C", "runs", "conversations", "answers", "prompt tokens", "output tokens", "seconds", "left out")
    return Table(f"{workload} · {engine}: how much was asked (of one run, medians over repeats)", head, rows)


def facts_table(arms: Sequence[Mapping[str, Any]]) -> Table | None:
    """What engines and servers say of themselves, a row a setup and version."""
    names = ("model", "version", "dtype", "device")
    rows: dict[tuple[str, ...], None] = {}
    for arm in arms:
        facts = arm.get("facts") or {}
        if facts:
            rows[(str(arm["label"]), *(str(facts[name]) if facts.get(name) else "" for name in names))] = None
    if not rows:
        return None
    return Table("Engines and servers, by what they say of themselves", ("setup", *names), list(rows), left=5)


def _of(points: Sequence[Point], workload: str, engine: str) -> list[Point]:
    return [p for p in points if (p.workload, p.setup.engine) == (workload, engine)]
