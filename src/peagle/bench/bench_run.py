"""`peagle bench` from its options to a report: everything is checked first, then measured, then drawn."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from peagle.bench.arms import Arm, GivenEndpoint, Setup, plan_arms
from peagle.bench.backends import Backends, RunSettings
from peagle.bench.results_file import GROWING, ResultsFile, open_results
from peagle.bench.sweep import Screen, Sweep, SweepOptions
from peagle.bench.workloads import Workload
from peagle.client.server_facts import read_server
from peagle.errors import InputError
from peagle.target.text import TargetText

RESULTS = "results.jsonl"


@dataclass(frozen=True)
class Plan:
    """What is to be measured. output: the folder for results, logs and report. command: as the user typed it."""

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
    from peagle.vllm.serve import check, find_vllm

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
    results = open_results(plan.output / RESULTS, settings_of(plan))
    if plan.retry_failed:
        results.arms = {key: arm for key, arm in results.arms.items() if not arm["failed"]}
    backends = Backends(plan.settings, text, plan.given, plan.output / "logs")
    waiting = [arm for arm in plan.arms if arm.key not in results.arms]
    if waiting or not results.runs:
        results.add_run(run_facts(plan))
    by_name = {workload.name: workload for workload in plan.workloads}
    Sweep(by_name, backends, results, plan.options, screen).run(plan.arms)
    return results


def settings_of(plan: Plan) -> dict[str, Any]:
    """Settings that decide what is measured: results of others are not continued."""
    s = plan.settings
    engine_args = {"peagle": dict(s.engine_args), "peagle-serve": list(s.serve_args), "vllm": list(s.vllm_args)}
    used = {setup.engine for setup in plan.setups}
    return {
        "target": s.target,
        "heads": {method: head_fingerprint(head) for method, head in s.heads.items()},
        "workloads": {workload.name: workload.fingerprint for workload in plan.workloads},
        "max_tokens": plan.options.max_tokens,
        "prompts_per_user": plan.options.prompts_per_user,
        "temperature": s.sampling.temperature,
        "seed": s.sampling.seed,
        "dtype": s.dtype,
        "device": s.device,
        "max_num_seqs": s.max_num_seqs,
        "max_model_len": s.max_model_len,
        "speculative_args": {method: dict(further) for method, further in s.speculative_args.items()},
        "engines": {engine: args for engine, args in engine_args.items() if engine in used},
        "extra_body": dict(s.extra_body),
    }


def run_facts(plan: Plan) -> dict[str, Any]:
    """One invocation: when, with which command, on what."""
    import torch

    from peagle.bench.machine import machine_facts

    settings = settings_of(plan)
    device = torch.device(plan.settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    machine = machine_facts(device, torch.float32)
    machine["dtype"] = plan.settings.dtype
    if any(setup.engine == "vllm" for setup in plan.setups):
        from peagle.vllm.serve import find_vllm

        installed = find_vllm()
        machine["vllm"] = installed.version if installed is not None else None
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": plan.command,
        "machine": machine,
        **{name: settings[name] for name in GROWING},
        "head_paths": dict(plan.settings.heads),
        "workload_sources": {workload.name: workload.source for workload in plan.workloads},
    }


def head_fingerprint(head: str) -> str:
    """Of a folder: its config, and the size and first MiB of its weights; of a Hub id: the id."""
    folder = Path(head).expanduser()
    if not folder.is_dir():
        return head
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(json.dumps([file.name, file.stat().st_size]).encode())
        with open(file, "rb") as opened:
            digest.update(opened.read(1 << 20))
    return digest.hexdigest()[:16]
