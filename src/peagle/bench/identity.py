"""What decides a measurement: settings, heads, servers, versions and machine. Results of others are not continued."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.server_commands import caches_prefixes
from peagle.client.server_facts import read_server
from peagle.drafter.draft_vocabulary import FILE as DRAFT_VOCABULARY
from peagle.drafter.loading import resolve_head
from peagle.errors import InputError
from peagle.target.loading import gguf_key, resolve_model

if TYPE_CHECKING:
    import torch

    from peagle.bench.backends import RunSettings
    from peagle.bench.bench_run import Plan

CHUNK = 1 << 20
TARGET_FILES = ("*.json", "*.jinja", "*.model", "*.safetensors", "*.bin")


def settings_of(plan: Plan) -> dict[str, Any]:
    """As JSON; reads the heads' files whole, the target's in part, and asks the endpoints for model and version. Raises
    InputError.

    What line_checks.GROWING names is by workload, method, engine or endpoint, so that a later run may bring more of
    them. The time that a server may take to start is left out: it changes no number.
    """
    s = plan.settings
    used = {setup.engine for setup in plan.setups}
    engine_args = {"peagle": dict(s.engine_args), "peagle-serve": list(s.serve_args), "vllm": list(s.vllm_args)}
    device = chosen_device(s.device)
    return {
        "target": s.target,
        "target_weights": target_weights(s.target),
        "heads": {method: head_fingerprint(head) for method, head in s.heads.items()},
        "workloads": {workload.name: workload.fingerprint for workload in plan.workloads},
        "max_tokens": plan.options.max_tokens,
        "prompts_per_user": plan.options.prompts_per_user,
        "warm_up": plan.options.warm_up,
        "temperature": s.sampling.temperature,
        "seed": s.sampling.seed,
        "dtype": s.dtype,
        "device": str(device),
        "machine": machine_of(device),
        "max_num_seqs": s.max_num_seqs,
        "max_model_len": s.max_model_len,
        "stall_timeout": s.stall_timeout,
        "request_timeout": s.request_timeout,
        "speculative_args": {method: dict(further) for method, further in s.speculative_args.items()},
        "engines": {engine: args for engine, args in engine_args.items() if engine in used},
        "prefix_caching": {engine: prefix_caching(s, engine) for engine in engine_args if engine in used},
        "threads": threads_of(used),
        "endpoints": endpoints_of(plan),
        "versions": versions_of(used),
        "extra_body": dict(s.extra_body),
    }


def chosen_device(device: str | None) -> torch.device:
    """What is computed on where nothing is said."""
    import torch

    return torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))


def machine_of(device: torch.device) -> dict[str, Any]:
    """What times depend on; of a run on the CPU the accelerator is None."""
    import torch

    from peagle.bench.machine import machine_facts

    facts = machine_facts(device, torch.float32)
    return {name: facts[name] for name in ("cpu", "cores", "gpu", "system")}


def prefix_caching(settings: RunSettings, engine: str) -> bool:
    """Whether an engine that is loaded or started here finds earlier prompts again; only its own flags turn it on."""
    if engine == "peagle":
        return bool(settings.engine_args.get("enable_prefix_caching", False))
    return caches_prefixes(settings.serve_args if engine == "peagle-serve" else settings.vllm_args)


def threads_of(engines: set[str]) -> dict[str, int]:
    """CPU threads of the engine in this process; those of servers stand in their flags."""
    import torch

    return {"peagle": torch.get_num_threads()} if "peagle" in engines else {}


def endpoints_of(plan: Plan) -> dict[str, dict[str, Any]]:
    """By label: where it is, which model it is asked for and how, and which version it says that it has."""
    found = {}
    for given in plan.given:
        told = read_server(given.url, plan.settings.api_key)
        about = {"url": given.url, "model": given.model or told.model, "api": given.api, "version": told.version}
        found[given.setup.label] = about
    return found


def versions_of(engines: set[str]) -> dict[str, str | None]:
    """Of this package, which measures, and of what the engines are made of."""
    import peagle

    versions: dict[str, str | None] = {"peagle": peagle.__version__}
    if engines & {"peagle", "peagle-serve"}:
        import torch
        import transformers

        versions |= {"torch": torch.__version__, "transformers": transformers.__version__}
    if "vllm" in engines:
        from peagle.vllm.installation import find_vllm

        installed = find_vllm()
        versions["vllm"] = installed.version if installed is not None else None
    return versions


def target_weights(target: str) -> dict[str, str]:
    """By target, which content it has: of a folder, config, tokenizer and weights by their sizes and by pieces spread
    over each file, for the whole takes minutes; of a Hub id the commit of the copy here, if there is one."""
    if not target:
        return {}
    source = resolve_model(target)
    folder = Path(source)
    if not folder.is_dir():
        commit = cached_commit(source)
        return {target: commit} if commit is not None else {}
    digest = hashlib.sha256()
    for file in sorted({file for pattern in TARGET_FILES for file in folder.glob(pattern) if file.is_file()}):
        digest.update(f"{file.name}\n{gguf_key(file)}\n".encode())
    return {target: digest.hexdigest()[:16]}


def head_fingerprint(head: str) -> str:
    """Of a folder: its config, its list of draft tokens and its weights, whole; of a Hub id: the id and its commit.

    A head of the Hub is fetched for that, as its engines would: without a commit a changed head would pass for the one
    that was measured. Where it cannot be had the id stands alone, and its setups will say why they do not start.
    """
    folder = Path(head).expanduser()
    if folder.is_dir():
        digest = hashlib.sha256()
        for file in sorted(
            [*folder.glob("config.json"), *folder.glob(DRAFT_VOCABULARY), *folder.glob("*.safetensors")]
        ):
            digest.update(f"{file.name}\n{file.stat().st_size}\n".encode())
            _add_content(digest, file)
        return digest.hexdigest()[:16]
    commit = hub_commit(head)
    return f"{head}@{commit}" if commit is not None else head


def hub_commit(name: str) -> str | None:
    """Of the copy in the Hub's cache, which is fetched if it is not there."""
    commit = cached_commit(name)
    if commit is not None:
        return commit
    try:
        return resolve_head(name).name
    except InputError:
        return None


def cached_commit(name: str) -> str | None:
    """Of the copy in the Hub's cache, which is named after it."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.safetensors"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True)).name
    except Exception:  # not cached, or no Hub id; huggingface_hub has an error of its own for each
        return None


def _add_content(digest: Any, file: Path) -> None:
    with open(file, "rb") as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
