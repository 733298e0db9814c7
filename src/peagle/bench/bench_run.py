"""`peagle bench` from its options to a report: everything is checked first, then measured, then drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peagle.bench.arms import Arm, GivenEndpoint, Setup, plan_arms
from peagle.bench.backends import Backends, RunSettings
from peagle.bench.identity import chosen_device, settings_of
from peagle.bench.line_checks import GROWING
from peagle.bench.results_file import ResultsFile, open_results
from peagle.bench.sweep import Screen, Sweep, SweepOptions
from peagle.bench.workloads import Workload
from peagle.client.server_facts import read_server
from peagle.errors import InputError
from peagle.target.text import TargetText

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Plan:
    """What is to be measured. output: the folder for results, logs and report. command: as the user typed it.
    server_commands: of endpoints, by name or label, for the report."""

    setups: Sequence[Setup]
    workloads: Sequence[Workload]
    concurrencies: Sequence[int]
    repeats: int
    interleave: bool
    settings: RunSettings
    options: SweepOptions
    given: Sequence[GivenEndpoint]
    output: Path
    command: str
    retry_failed: bool = False
    server_commands: Mapping[str, str] = field(default_factory=dict)

    @property
    def arms(self) -> list[Arm]:
        names = [workload.name for workload in self.workloads]
        return plan_arms(self.setups, names, self.concurrencies, self.repeats, self.interleave)


def check_plan(plan: Plan, text: TargetText | None) -> list[str]:
    """Refuse what cannot work before anything starts; return what is worth knowing. Raises InputError."""
    most = max(plan.concurrencies)
    for workload in plan.workloads:
        if len(workload) < most:
            raise InputError(
                f"--concurrency: {most} users need at least as many prompts, and the workload {workload.name} has "
                f"{len(workload)}; lower it, or take more prompts"
            )
        if workload.prompts and plan.settings.target and text is not None and text.tokenizer is None:
            raise InputError(
                f"workload {workload.name}: is text, and {text.name_or_path} has no tokenizer, expected random:IN:OUT"
            )
        if workload.token_ids and any(given.api == "chat" for given in plan.given):
            raise InputError(f"workload {workload.name}: holds token ids, expected api=completions at the endpoint")
    notes: list[str] = []
    for setup in plan.setups:
        if setup.method in plan.settings.heads and setup not in {given.setup for given in plan.given}:
            assert text is not None
            notes += _check_head(setup, plan.settings.heads[setup.method], text)
    for given in plan.given:
        read_server(given.url, plan.settings.api_key)
    if any(setup.engine == "vllm" for setup in plan.setups):
        notes += _check_vllm(plan, text)
    return list(dict.fromkeys(notes))


def _check_head(setup: Setup, head: str, text: TargetText) -> list[str]:
    """A head that does not fit, or is of the other kind."""
    from peagle.target.head_fit import check_head, target_warnings

    facts = check_head(head, text.facts, setup.method, f"--{setup.method}")
    notes = target_warnings(facts, text.facts)
    trained = None if facts.config is None else facts.config.k_train
    if trained is not None and setup.k > trained:
        notes.append(f"K={setup.k} is more than the {trained} that {head} was trained for: later drafts are guesses")
    return notes


def _check_vllm(plan: Plan, text: TargetText | None) -> list[str]:
    from peagle.bench.server_commands import speculative_settings, vllm_command
    from peagle.vllm.installation import find_vllm
    from peagle.vllm.serve import check

    assert text is not None
    vllm_command(text.source, None, plan.settings.vllm_args)  # is it there, and are the flags ours to give?
    installed = find_vllm()
    notes: list[str] = []
    for setup in plan.setups:
        if setup.engine == "vllm":
            further = plan.settings.speculative_args.get(setup.method, {})
            settings = speculative_settings(setup, plan.settings.heads.get(setup.method), further)
            notes += check(plan.settings.target, settings, installed)
    return notes


def run_plan(plan: Plan, text: TargetText | None, screen: Screen) -> ResultsFile:
    """Measure what is not in the folder's results yet, and what failed there if that is to be tried again."""
    settings = settings_of(plan)
    results = open_results(plan.output / RESULTS, settings)
    again = {arm.key for arm in plan.arms if plan.retry_failed and results.arms.get(arm.key, {}).get("failed")}
    backends = Backends(plan.settings, text, plan.given, plan.output / "logs")
    if again or not results.runs or any(arm.key not in results.arms for arm in plan.arms):
        results.add_run(run_facts(plan, settings))
    results.add_server_commands(plan.server_commands)
    by_name = {workload.name: workload for workload in plan.workloads}
    Sweep(by_name, backends, results, plan.options, screen, again).run(plan.arms)
    return results


def not_measured(plan: Plan, results: ResultsFile) -> list[Arm]:
    """Arms of the plan that the results hold no line of."""
    return [arm for arm in plan.arms if arm.key not in results.arms]


def run_facts(plan: Plan, settings: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One invocation: when, with which command, on what. settings: what `settings_of` the plan gave."""
    import torch

    from peagle.bench.machine import machine_facts

    settings = settings_of(plan) if settings is None else settings
    machine = machine_facts(chosen_device(plan.settings.device), torch.float32)
    machine |= {"dtype": plan.settings.dtype, **settings["versions"]}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": plan.command,
        "machine": machine,
        **{name: settings[name] for name in GROWING},
        "head_paths": dict(plan.settings.heads),
        "workload_sources": {workload.name: workload.source for workload in plan.workloads},
    }
