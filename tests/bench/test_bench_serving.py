"""The sweep script of benchmarks/."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import heads, target  # noqa: F401  (fixtures)

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving.py"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def test_bad_input_is_one_line(target, tmp_path):  # noqa: F811
    done = run(target, "--prompts", tmp_path / "none.jsonl")
    assert done.returncode == 1
    assert done.stderr.strip().endswith("no such file")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_one_table_one_json(target, heads, tmp_path):  # noqa: F811
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two"}\n{"prompt": "three"}\n')
    out = tmp_path / "out.json"
    done = run(
        *(target, "--prompts", f"{prompts}:2", "--p-eagle", heads["p-eagle"], "--k", "2", "--concurrency", "1,2"),
        *("--engines", "peagle-serve", "--max-tokens", "6", "--max-model-len", "200", "--json", out),
        "--serve-args=--device cpu --threads 1",
    )
    assert done.returncode == 0, done.stderr
    rows = done.stdout.splitlines()
    assert rows[0].split()[:4] == ["engine", "method", "K", "C"]
    assert len(rows) == 5
    content = json.loads(out.read_text())
    assert [(a["method"], a["k"], a["concurrency"], a["completed"]) for a in content["arms"]] == [
        ("none", 0, 1, 2), ("none", 0, 2, 2), ("p-eagle", 2, 1, 2), ("p-eagle", 2, 2, 2),
    ]  # fmt: skip
    assert content["machine"]["cores"] >= 1
    assert content["command"].startswith("python ")
