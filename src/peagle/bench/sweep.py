"""Runs the arms that are not in the results yet, each setup loaded once, and writes every arm as it ends."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from peagle.bench.arm_lines import arm_content, arm_line, check_line
from peagle.bench.arms import Arm, Setup
from peagle.bench.backends import Backend, Backends
from peagle.bench.records import Record
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


@dataclass(slots=True)
class Sweep:
    """Measures arms that are not in the results yet. workloads: by name. again: keys of arms that are there and are
    measured once more; their old lines stay until new ones replace them."""

    workloads: Mapping[str, Workload]
    backends: Backends
    results: ResultsFile
    options: SweepOptions
    screen: Screen
    again: Collection[str] = ()

    def run(self, arms: Sequence[Arm]) -> None:
        """In their order.

        A setup that cannot be loaded or started is recorded with the reason and its arms, and the others go on; a first
        turn that is longer than the model counts as such a reason. What failed in an earlier run is tried again.
        """
        waiting = [arm for arm in arms if arm.key not in self.results.arms or arm.key in self.again]
        done = len(arms) - len(waiting)
        if done:
            self.screen.say(f"{done} of {len(arms)} arms are in the results already")
        left = TimeLeft(self.results.arms.values())
        for setup, group in self._groups(waiting):
            try:
                self._measure_group(setup, group, waiting, len(arms), left)
            except InputError as error:
                missing = [arm.key for arm in group if arm in waiting]
                if missing:
                    self.results.add_failed_start(setup.label, str(error), missing)
                self.screen.say(f"{setup.label}: {error}")
                waiting = [arm for arm in waiting if arm not in group]

    def _measure_group(
        self, setup: Setup, group: Sequence[Arm], waiting: list[Arm], num_arms: int, left: TimeLeft
    ) -> None:
        """Arms of one loaded setup; what is measured leaves `waiting`. The backend is not referred to afterwards, so
        that the next one finds its memory free."""
        began = time.monotonic()
        with self.backends.open(setup) as backend:
            left.loaded(time.monotonic() - began)
            for arm in group:
                place = num_arms - len(waiting) + 1
                self.screen.say(f"[{place}/{num_arms}] {_label(arm)}{_about(left.seconds(waiting))}")
                began = time.monotonic()
                line = self.measure(arm, backend)
                left.measured(arm, time.monotonic() - began)
                waiting.remove(arm)
                self.screen.say("    " + arm_line(line))
                if "engine" in line["failures"]:
                    raise InputError(f"the engine failed and is not used further: {line['errors'][-1]}")

    def _groups(self, arms: Sequence[Arm]) -> list[tuple[Setup, list[Arm]]]:
        """Arms that share a loaded engine or a running server."""
        groups: list[tuple[Setup, list[Arm]]] = []
        for setup, members in groupby(arms, key=lambda arm: arm.setup):
            if self.backends.needs_fresh(setup):
                groups += [(setup, [arm]) for arm in members]
            else:
                groups.append((setup, list(members)))
        return groups

    def measure(self, arm: Arm, backend: Backend) -> dict[str, Any]:
        """Warm up, empty the cache, run one arm and write its line, which comes back."""
        workload, options = self.workloads[arm.workload], self.options
        questions = backend.questions(workload, options.max_tokens)
        questions.check_lengths()
        notes = self._warm_up(arm, workload, backend)
        note = backend.reset_cache()
        if note is not None:
            notes.append(note)
        conversations = options.num_conversations(workload, arm.concurrency)
        self.screen.begin(f"C={arm.concurrency}", workload.num_requests(conversations))
        try:
            run = backend.run(questions, arm.concurrency, self.screen.request, limit=conversations)
        finally:
            self.screen.end()
        notes += run.notes
        line = arm_content(arm, conversations, run, options.detailed)
        line |= {"model_id": backend.facts.get("model"), "tokenizer_id": backend.facts.get("tokenizer")}
        line |= {"command": backend.command, "facts": backend.facts, "notes": notes}
        if self.backends.settings.synthetic(arm.setup):
            line["synthetic"] = dict(self.backends.settings.speculative_args[arm.setup.method])
        elif options.check:
            check_line(line, arm, run, self.results, backend.target)
        self.results.add_arm(arm.key, line)
        return line

    def _warm_up(self, arm: Arm, workload: Workload, backend: Backend) -> list[str]:
        """Ask some first turns that are not counted, of prompts that no arm asks, so that no prefix cache holds those
        that are measured; a note where that failed."""
        count = arm.concurrency if self.options.warm_up is None else self.options.warm_up
        if not count:
            return []
        short = backend.questions(workload.unmeasured(), WARM_UP_TOKENS, first_turns=True)
        failures = backend.run(short, arm.concurrency, None, limit=count).failures
        if not failures:
            return []
        kinds = ", ".join(f"{number} {kind}" for kind, number in failures.items())
        return [f"C={arm.concurrency}: of {count} warm-up requests failed {kinds}"]


def _label(arm: Arm) -> str:
    repeat = f" · run {arm.repeat + 1}" if arm.repeat else ""
    return f"{arm.setup.label} · {arm.workload} · C={arm.concurrency}{repeat}"


def _about(seconds: float | None) -> str:
    return f" · about {duration(seconds)} left" if seconds is not None else ""
