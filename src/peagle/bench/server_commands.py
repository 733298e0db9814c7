"""The commands that the servers under test are started with, or (endpoints) were."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.arms import Setup
from peagle.errors import InputError

CACHE_FLAGS = ("--enable-prefix-caching", "--no-enable-prefix-caching")


def speculative_settings(setup: Setup, head: str | None, further: Mapping[str, Any]) -> dict[str, Any] | None:
    """vLLM's speculative config of a setup, with further keys; None without speculation."""
    if head is None:
        return None
    folder = Path(head).expanduser()
    return {
        "method": "eagle3",
        "model": str(folder.resolve()) if folder.is_dir() else head,
        "num_speculative_tokens": setup.k,
        "parallel_drafting": setup.method == "p-eagle",
        **further,
    }


def caches_prefixes(extra_args: Sequence[str]) -> bool:
    """Whether a server's own flags ask for prefix caching, which the benchmark otherwise turns off."""
    named = [arg.split("=", 1)[0].replace("_", "-") for arg in extra_args]
    return CACHE_FLAGS[0] in named


def common_args(port: int, options: Sequence[tuple[str, object]], extra_args: Sequence[str]) -> list[str]:
    """Flags that both servers know by the same names. options whose value is None are left out, and so is every flag
    that extra_args set themselves."""
    given = {arg.split("=", 1)[0].replace("_", "-") for arg in extra_args}
    args = ["--host", "127.0.0.1", "--port", str(port)]
    if not given & set(CACHE_FLAGS):
        args.append(CACHE_FLAGS[1])
    for flag, value in options:
        if value is not None and flag not in given:
            args += [flag, str(value)]
    return [*args, *extra_args]


def peagle_command(target: str, settings: dict[str, Any] | None, args: Sequence[str]) -> list[str]:
    """`peagle serve`, in this Python; always with K drafts, unless args ask for a number that changes with the load."""
    command = [sys.executable, "-m", "peagle", "serve", target]
    if settings is not None:
        command += ["--speculative-config", json.dumps(settings)]
        if not {"--dynamic-speculation", "--no-dynamic-speculation"} & set(args):
            command.append("--no-dynamic-speculation")
    return [*command, *args]


def vllm_command(source: str, settings: dict[str, Any] | None, args: Sequence[str]) -> list[str]:
    """`vllm serve` of the vLLM that is installed here or on PATH. source: what vLLM itself can load."""
    from peagle.vllm.flags import refuse_repeated
    from peagle.vllm.installation import find_vllm
    from peagle.vllm.serve import build_command, not_installed

    refuse_repeated(args)
    installed = find_vllm()
    if installed is None:
        raise InputError(f"--engine vllm: {not_installed()}")
    if settings is not None and not settings["parallel_drafting"]:
        settings = {key: value for key, value in settings.items() if key != "parallel_drafting"}
    return build_command(installed, source, settings, args)


def server_env(command: Sequence[str]) -> dict[str, str]:
    """This process's environment. A program of another Python has its own packages, which PYTHONPATH must not cover."""
    env = dict(os.environ)
    if Path(command[0]).parent != Path(sys.executable).parent:
        env.pop("PYTHONPATH", None)
    env.setdefault("VLLM_NO_USAGE_STATS", "1")
    return env


def read_server_commands(path: Path, known: Sequence[str]) -> dict[str, str]:
    """A JSON object from an endpoint's name or label to the command line of its server. Raises InputError, also for a
    name that is not among `known`."""
    flag = f"--server-commands {path}"
    try:
        commands = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{flag}: cannot be read ({error.strerror or error})")
    except ValueError as error:
        raise InputError(f"{flag}: {error}, expected a JSON object")
    if not isinstance(commands, dict):
        raise InputError(f"{flag}: holds {type(commands).__name__}, expected an object from endpoints to commands")
    for name, command in commands.items():
        if name not in known:
            choices = ", ".join(dict.fromkeys(known)) or "none (there is no --endpoint)"
            raise InputError(f"{flag}: {name!r} is no endpoint here, expected some of: {choices}")
        if not isinstance(command, str) or not command.strip():
            raise InputError(f"{flag}: {name}: got {command!r}, expected a command line")
    return commands
