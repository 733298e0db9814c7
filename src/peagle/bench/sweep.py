"""Runs the arms that are not in the results yet, each setup loaded once, and writes every arm as it ends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Protocol

from peagle.bench.arm_lines import arm_content, arm_line, check_line
from peagle.bench.arms import Arm, Setup
from peagle.bench.backends import Backend, Backends
from peagle.bench.records import Record, Run
from peagle.bench.results_file import ResultsFile
from peagle.bench.time_left import TimeLeft, duration
from peagle.bench.workloads import Workload
from peagle.errors import InputError

WARM_UP_TOKENS = 16
FEWEST = 8


class Screen(Protocol):
    """Where a sweep shows itself: a line of text, and a bar for the requests of the arm that runs."""

    def say(self, text: str) -> None: ...

    def begin(self, label: str, num_requests: int) -> None: ...

    def request(self, record: Record) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """warm_up: conversations before each arm, at its concurrency, that are not counted; None: as many as the
    concurrency. prompts_per_user: a concurrency C asks the first C times so many conversations (at least FEWEST) of
    each workload; None: all. detailed keeps texts, token ids and every gap between tokens in the results."""

    max_tokens: int
    warm_up: int | None = None
    prompts_per_user: int | None = None
    detailed: bool = False
    check: bool = True

    def num_conversations(self, workload: Workload, concurrency: int) -> int:
        """How many of a workload's conversations an arm asks."""
        if self.prompts_per_user is None:
            return len(workload)
        return min(len(workload), max(FEWEST, self.prompts_per_user * concurrency))


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
    conversations = options.num_conversations(workload, arm.concurrency)
    screen.begin(f"C={arm.concurrency}", workload.num_requests(conversations))
    try:
        run = backend.run(questions, arm.concurrency, screen.request, limit=conversations)
    finally:
        screen.end()
    line = arm_content(arm, conversations, run, options.detailed)
    line |= {"command": backend.command, "facts": backend.facts, "notes": notes}
    if options.check:
        check_line(line, arm, run, results)
    return line, run


def _repeat(arm: Arm) -> str:
    return f" · run {arm.repeat + 1}" if arm.repeat else ""
