"""heads/make_data.sh, with a stand-in for the commands it runs."""

import os
import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "heads" / "make_data.sh"
# Notes its arguments; merge and join make their folder, which must be new, and check fails until it is allowed to.
STAND_IN = """#!/usr/bin/env bash
echo "$*" >>"$NOTES"
case $2 in
  merge | join) mkdir "${@: -1}" ;;
  check) [ -e "$NOTES.allowed" ] ;;
esac
"""


def run(folder: Path) -> tuple[int, list[str]]:
    notes = folder / "notes"
    notes.unlink(missing_ok=True)
    command = ["bash", str(SCRIPT), "train", "eval", str(folder / "data"), "1"]
    environment = {**os.environ, "PEAGLE": str(folder / "peagle"), "NOTES": str(notes)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    return done.returncode, notes.read_text().splitlines()


def made(lines: list[str]) -> list[str]:
    return [Path(line.split()[-1]).name for line in lines if line.split()[1] in ("merge", "join")]


def test_what_is_finished_stays_when_it_is_run_again(tmp_path):
    (tmp_path / "peagle").write_text(STAND_IN)
    (tmp_path / "peagle").chmod(0o755)
    code, lines = run(tmp_path)
    assert code != 0, "check refuses"
    assert made(lines) == ["answers-1", "answers-2", "new-3", "answers-3"]
    (tmp_path / "data" / "answers-3").rmdir()
    (tmp_path / "notes.allowed").touch()
    code, lines = run(tmp_path)
    assert code == 0
    assert made(lines) == ["answers-3"]
    assert [line.split()[1] for line in lines][-6:] == ["check", "stats"] * 3
