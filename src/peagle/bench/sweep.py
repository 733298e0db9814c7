"""Runs the arms that are not in the results yet, each setup loaded once, and writes every arm as it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Protocol

from peagle.bench.answer_check import answers_of, check_answers, check_phrase
from peagle.bench.arms import Arm, Setup
from peagle.bench.backends import Backend, Backends
from peagle.bench.records import Record, Run
from peagle.bench.results_file import ResultsFile
from peagle.bench.serving_metrics import request_lists, serving_metrics
from peagle.bench.time_left import TimeLeft, duration
from peagle.bench.workloads import Workload
from peagle.errors import InputError

WARM_UP_TOKENS = 16


class Screen(Protocol):
    """Where a sweep shows itself: a line of text, and a bar for the requests of the arm that runs."""

    def say(self, text: str) -> None: ...

    def begin(self, label: str, num_requests: int) -> None: ...

    def request(self, record: Record) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """warm_up: conversations before each arm, at its concurrency, that are not counted; None: as many as the
    concurrency. detailed keeps texts, token ids and every gap between tokens in the results."""

    max_tokens: int
    warm_up: int | None = None
    detailed: bool = False
    check: bool = True


def run_sweep(
    arms: Sequence[Arm],
    workloads: Mapping[str, Workload],
    backends: Backends,
    results: ResultsFile,
    options: SweepOptions,
    screen: Screen,
) -> None:
    """Measure `arms` in their order, those of the results left out.

    A setup that cannot be loaded or started is recorded with the reason, and the others go on; a first turn that is
    longer than the model counts as such a reason. Setups that failed in an earlier run are tried again.
    """
    waiting = [arm for arm in arms if arm.key not in results.arms]
    if len(waiting) < len(arms):
        screen.say(f"{len(arms) - len(waiting)} of {len(arms)} arms are in the results already")
    left = TimeLeft(results.arms.values())
    place = len(arms) - len(waiting)
    for setup, group in _groups(waiting, backends):
        began = time.monotonic()
        try:
            with backends.open(setup) as backend:
                left.loaded(time.monotonic() - began)
                results.started(setup.label)
                place = _run_group(group, place, len(arms), waiting, backend, workloads, results, options, screen, left)
        except InputError as error:
            results.add_failed_start(setup.label, str(error))
            screen.say(f"{setup.label}: {error}")
            place += sum(arm.key not in results.arms for arm in group)


def _groups(arms: Sequence[Arm], backends: Backends) -> list[tuple[Setup, list[Arm]]]:
    """Arms that share a loaded engine or a running server."""
    groups: list[tuple[Setup, list[Arm]]] = []
    for setup, members in groupby(arms, key=lambda arm: arm.setup):
        if backends.needs_fresh_server(setup):
            groups += [(setup, [arm]) for arm in members]
        else:
            groups.append((setup, list(members)))
    return groups


def _run_group(
    group: Sequence[Arm],
    place: int,
    total: int,
    waiting: Sequence[Arm],
    backend: Backend,
    workloads: Mapping[str, Workload],
    results: ResultsFile,
    options: SweepOptions,
    screen: Screen,
    left: TimeLeft,
) -> int:
    """Measure arms on an open backend; how many of all are done then."""
    for arm in group:
        place += 1
        workload = workloads[arm.workload]
        remaining = [other for other in waiting if other.key not in results.arms]
        estimate = left.seconds(remaining)
        about = f" · about {duration(estimate)} left" if estimate is not None else ""
        screen.say(f"[{place}/{total}] {arm.setup.label} · {arm.workload} · C={arm.concurrency}{_repeat(arm)}{about}")
        began = time.monotonic()
        line, run = measure(arm, workload, backend, results, options, screen)
        results.add_arm(arm.key, line)
        left.measured(arm, time.monotonic() - began)
        screen.say("    " + arm_line(line))
        if any(record.failure == "engine" for record in run.records):
            raise InputError(f"the engine failed and is not used further: {run.records[-1].error}")
    return place


def measure(
    arm: Arm, workload: Workload, backend: Backend, results: ResultsFile, options: SweepOptions, screen: Screen
) -> tuple[dict[str, Any], Run]:
    """Warm up, empty the cache, run one arm; its line for the results."""
    questions = backend.questions(workload, options.max_tokens)
    questions.check_lengths()
    notes = []
    warm_up = arm.concurrency if options.warm_up is None else options.warm_up
    if warm_up:
        short = backend.questions(replace(workload, output_len=None), WARM_UP_TOKENS, first_turns=True)
        failures = backend.run(short, arm.concurrency, None, limit=warm_up).failures
        if failures:
            kinds = ", ".join(f"{count} {kind}" for kind, count in failures.items())
            notes.append(f"C={arm.concurrency}: of {warm_up} warm-up requests failed {kinds}")
    note = backend.reset_cache()
    if note is not None:
        notes.append(note)
    screen.begin(f"C={arm.concurrency}", workload.num_requests)
    try:
        run = backend.run(questions, arm.concurrency, screen.request)
    finally:
        screen.end()
    line = arm_content(arm, workload, run, options.detailed)
    line |= {"command": backend.command, "facts": backend.facts, "notes": notes}
    if options.check:
        reference = reference_answers(results, arm)
        if reference is not None:
            line["check"] = check_answers(reference, run)
        elif arm.setup.method == "none" and run.succeeded:
            line["answers"] = [list(answer) for answer in answers_of(run)]
            other = other_engine(results, arm)
            if other is not None:
                line["check_engines"] = {"with": other["engine"], **check_answers(other["answers"], run)}
    return line, run


def arm_content(arm: Arm, workload: Workload, run: Run, detailed: bool) -> dict[str, Any]:
    """An arm as JSON: what it is, `vllm bench serve`'s fields, and what that has no field for."""
    return {
        **arm.to_dict(),
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": arm.setup.engine,
        "label": arm.setup.label,
        "num_prompts": len(workload),
        "request_rate": "inf",
        "max_concurrency": arm.concurrency,
        **serving_metrics(run),
        "num_skipped": run.num_skipped,
        "failures": run.failures,
        "spec": None if run.spec is None else asdict(run.spec),
        "prefix_cache": {"queries": run.cache_queries, "hits": run.cache_hits},
        **request_lists(run, detailed),
    }


def reference_answers(results: ResultsFile, arm: Arm) -> Any | None:
    """The answers of plain decoding in the same engine: the first such arm's, which is the lowest concurrency's."""
    for other in results.arms.values():
        same = (other["engine"], other["workload"]) == (arm.setup.engine, arm.workload)
        if same and other.get("answers") and other["key"] != arm.key:
            return other["answers"]
    return None


def other_engine(results: ResultsFile, arm: Arm) -> dict[str, Any] | None:
    """The first arm of another engine that keeps plain decoding's answers to the same workload."""
    kept = (other for other in results.arms.values() if other.get("answers") and other["workload"] == arm.workload)
    return next((other for other in kept if other["engine"] != arm.setup.engine), None)


def arm_line(line: Mapping[str, Any]) -> str:
    """What came out of an arm, for the terminal."""
    parts = [f"{line['output_throughput']:.1f} tokens/s"]
    if line.get("median_ttft_ms") is not None:
        parts.append(f"TTFT {line['median_ttft_ms']:.0f} ms")
    if line.get("median_tpot_ms") is not None:
        parts.append(f"TPOT {line['median_tpot_ms']:.1f} ms")
    if line.get("spec_decode_acceptance_length") is not None:
        parts.append(f"acceptance length {line['spec_decode_acceptance_length']:.2f}")
    if line.get("check"):
        parts.append(check_phrase(line["check"]))
    if line["failed"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in line["failures"].items())
        first = next(error for error in line["errors"] if error)
        parts.append(f"FAILED: {line['failed']} of {line['failed'] + line['completed']} requests ({kinds}); {first}")
    return " · ".join(parts)


def _repeat(arm: Arm) -> str:
    return f" · run {arm.repeat + 1}" if arm.repeat else ""
