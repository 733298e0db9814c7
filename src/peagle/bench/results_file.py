"""The results of a benchmark as JSON lines: a head line that says what was measured, then a line an arm.

An arm's line is written when the arm has ended, in one piece, so a run that is broken off loses at most the arm that it
was in; the next run with the same settings goes on behind it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.line_checks import GROWING, check_fields
from peagle.errors import InputError

FORMAT = "peagle-bench"
VERSION = 1
NAMED_ARMS = 6
HALF = re.compile(r"\\u[dD][89a-fA-F]")  # JSON's escape of half a character


class ResultsFile:
    """Settings, runs (each invocation's command, machine and versions), finished arms and failed starts.

    arms: by key, the latest line of each. What did not start is tried again by the next run. server_commands: of
    endpoints, by name or label.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = dict(settings)
        self.runs: list[dict[str, Any]] = []
        self.arms: dict[str, dict[str, Any]] = {}
        self.server_commands: dict[str, str] = {}
        self._not_started: dict[str, tuple[str, str]] = {}  # by the arm's key: setup and error

    @property
    def failed_starts(self) -> dict[str, str]:
        """Why arms were not measured, by their setup and keys: those that have no line since."""
        together: dict[tuple[str, str], list[str]] = {}
        for key, failure in self._not_started.items():
            together.setdefault(failure, []).append(key)
        return {_setup_and_arms(setup, keys): error for (setup, error), keys in together.items()}

    def add_run(self, run: Mapping[str, Any]) -> None:
        """One invocation; what is in it of GROWING, by name, joins the settings."""
        self._take_run(run)
        self._append({"type": "run", **run})

    def _take_run(self, run: Mapping[str, Any]) -> None:
        self.runs.append(dict(run))
        for name in GROWING:
            self.settings[name] = {**self.settings.get(name, {}), **run.get(name, {})}

    def add_arm(self, key: str, arm: Mapping[str, Any]) -> None:
        """Also says which run it belongs to."""
        line = {"type": "arm", "key": key, "run": len(self.runs) - 1, **arm}
        self._take_arm(line)
        self._append(line)

    def _take_arm(self, line: dict[str, Any]) -> None:
        self.arms[line["key"]] = line
        self._not_started.pop(line["key"], None)

    def add_failed_start(self, setup: str, error: str, keys: Sequence[str]) -> None:
        """keys: the arms that were not measured because of it."""
        line = {"type": "failed_start", "setup": setup, "error": error, "arms": list(keys)}
        self._take_failed_start(line)
        self._append(line)

    def _take_failed_start(self, line: Mapping[str, Any]) -> None:
        # earlier versions did not say which arms
        for key in line.get("arms", [line["setup"]]):
            self._not_started[key] = line["setup"], line["error"]

    def add_server_commands(self, commands: Mapping[str, str]) -> None:
        """How endpoints were started; later ones replace earlier ones of the same name."""
        if all(self.server_commands.get(name) == command for name, command in commands.items()):
            return
        self.server_commands.update(commands)
        self._append({"type": "server_commands", "commands": dict(commands)})

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
        # what has no UTF-8 (half a character that a server says) becomes a question mark, so that the file can be read
        with open(self.path, "a", encoding="utf-8", errors="replace", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def _take(self, where: str, line: dict[str, Any]) -> None:
        """A line that was read. where: file and line, for messages."""
        kind = line.get("type")
        if kind in ("run", "arm", "failed_start", "server_commands"):
            check_fields(where, kind, line)
        if kind == "run":
            self._take_run(line)
        elif kind == "arm":
            self._take_arm(line)
        elif kind == "failed_start":
            self._take_failed_start(line)
        elif kind == "server_commands":
            self.server_commands.update(line["commands"])
        elif kind == "started":  # earlier versions: a setup that had failed works now
            self._not_started.pop(line.get("setup", ""), None)
        else:
            raise InputError(f"{where}: unknown line type {kind!r}")


def _setup_and_arms(setup: str, keys: Sequence[str]) -> str:
    if list(keys) == [setup]:
        return setup
    more = f" and {len(keys) - NAMED_ARMS} more" if len(keys) > NAMED_ARMS else ""
    return f"{setup} ({', '.join(keys[:NAMED_ARMS])}{more})"


def open_results(path: Path, settings: Mapping[str, Any]) -> ResultsFile:
    """Start a file, or go on with one of the same settings. Raises InputError for any other, saying what differs."""
    if path.exists():
        results = read_results(path)
        differing = differences(results.settings, settings)
        if differing:
            lines = "".join(f"\n  {line}" for line in differing)
            raise InputError(
                f"{path}: holds results of other settings, so they cannot be continued; choose another --output or the "
                f"same settings (there -> now):{lines}"
            )
        drop_unfinished_line(path)
        return results
    results = ResultsFile(path, settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        results._append({"type": "head", "format": FORMAT, "version": VERSION, "settings": dict(settings)})
    except OSError as error:
        raise InputError(f"--output: {path} cannot be written ({error.strerror or error})")
    return results


def read_results(path: Path) -> ResultsFile:
    """Raises InputError for what is no results file, one of another format version (both versions are named), or a
    damaged one, with the line and the field."""
    try:
        content = path.read_bytes()
        # a run that was killed may have left a line without its end, cut within a character
        text = content[: content.rfind(b"\n") + 1].decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})")
    # not str.splitlines: it also cuts at U+2028 and others, which JSON texts may hold
    lines = text.split("\n")[:-1]
    head = _parse(path, 1, lines[0]) if lines else {}
    if head.get("format") != FORMAT:
        raise InputError(f"{path}: is no results file of peagle bench (no head line with format {FORMAT!r})")
    if head.get("version") != VERSION:
        raise InputError(
            f"{path}: has format version {head.get('version')}, this peagle reads and writes version {VERSION}; use "
            "the peagle that wrote it, or measure again into another --output"
        )
    check_fields(f"{path}:1", "head", head)
    check_fields(f"{path}:1", "settings", head["settings"])
    results = ResultsFile(path, head["settings"])
    for number, line in enumerate(lines[1:], start=2):
        results._take(f"{path}:{number}", _parse(path, number, line))
    return results


def differences(there: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`name: there -> now` of every setting that differs; of the growing ones those in both are compared."""
    there, now = json.loads(json.dumps(there)), json.loads(json.dumps(now))
    found = []
    for name in sorted(there.keys() | now.keys()):
        a, b = there.get(name), now.get(name)
        if name in GROWING:
            a, b = a or {}, b or {}
            both = sorted(a.keys() & b.keys())
            found += [f"{name}.{key}: {a[key]!r} -> {b[key]!r}" for key in both if a[key] != b[key]]
        elif a != b:
            found.append(f"{name}: {a!r} -> {b!r}")
    return found


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
        if HALF.search(line):
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise InputError(f"{path}:{number}: holds half a character (a surrogate without the other of its pair)")
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets as deep
        raise InputError(f"{path}:{number}: not JSON ({getattr(error, 'msg', error)})")
    if not isinstance(content, dict):
        raise InputError(f"{path}:{number}: expected an object, got {type(content).__name__}")
    return content


def drop_unfinished_line(path: Path) -> None:
    """Cut what a killed run left behind the last line end, so that the next line begins on its own."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
