"""The results of a benchmark as JSON lines: a head line that says what was measured, then a line an arm.

An arm's line is written when the arm has ended, in one piece, so a run that is broken off loses at most the arm that it
was in; the next run with the same settings goes on behind it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.errors import InputError

FORMAT = "peagle-bench"
VERSION = 1
# settings to which a later run may add: fingerprints of workloads and heads, arguments of engines
GROWING = ("workloads", "heads", "engines")


class ResultsFile:
    """Settings, runs (each invocation's command, machine and versions), finished arms and failed starts.

    arms: by key, the latest line of each. starts that failed are tried again by the next run.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = dict(settings)
        self.runs: list[dict[str, Any]] = []
        self.arms: dict[str, dict[str, Any]] = {}
        self.failed_starts: dict[str, str] = {}

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
        self.arms[key] = line
        self._append(line)

    def add_failed_start(self, setup: str, error: str) -> None:
        self.failed_starts[setup] = error
        self._append({"type": "failed_start", "setup": setup, "error": error})

    def started(self, setup: str) -> None:
        """A setup that failed in an earlier run works now."""
        if setup in self.failed_starts:
            del self.failed_starts[setup]
            self._append({"type": "started", "setup": setup})

    def _append(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line, ensure_ascii=False, separators=(",", ":"), allow_nan=False) + "\n"
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


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
        _drop_unfinished_line(path)
        return results
    results = ResultsFile(path, settings)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        results._append({"type": "head", "format": FORMAT, "version": VERSION, "settings": dict(settings)})
    except OSError as error:
        raise InputError(f"--output: {path} cannot be written ({error.strerror or error})")
    return results


def read_results(path: Path) -> ResultsFile:
    """Raises InputError for what is no results file, or one of another format version (both versions are named)."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read ({error})")
    head = _parse(path, 1, lines[0]) if lines else {}
    if head.get("format") != FORMAT:
        raise InputError(f"{path}: is no results file of peagle bench (no head line with format {FORMAT!r})")
    if head.get("version") != VERSION:
        raise InputError(
            f"{path}: has format version {head.get('version')}, this peagle reads and writes version {VERSION}; use "
            "the peagle that wrote it, or measure again into another --output"
        )
    results = ResultsFile(path, head["settings"])
    for number, line in enumerate(lines[1:], start=2):
        if number == len(lines) and not line.endswith("\n"):
            break  # the run was killed while writing it
        content = _parse(path, number, line)
        kind = content.get("type")
        if kind == "run":
            results._take_run(content)
        elif kind == "arm":
            results.arms[content["key"]] = content
        elif kind == "failed_start":
            results.failed_starts[content["setup"]] = content["error"]
        elif kind == "started":
            results.failed_starts.pop(content["setup"], None)
        else:
            raise InputError(f"{path}:{number}: unknown line type {kind!r}")
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
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number}: not JSON ({error.msg})")
    if not isinstance(content, dict):
        raise InputError(f"{path}:{number}: expected an object, got {type(content).__name__}")
    return content


def _drop_unfinished_line(path: Path) -> None:
    """Cut what a killed run left behind the last line end, so that the next line begins on its own."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(path, end)
