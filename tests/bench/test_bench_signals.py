"""A benchmark that is ended from outside: nothing that it started is left, and the same command goes on."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peagle.bench.results_file import read_results
from tests.bench.test_bench_server_process import wait_until_gone
from tests.cli.conftest import heads, run_peagle, target  # noqa: F401  (fixtures)


def server_of(log: Path) -> int:
    """The process of the server whose command line is the last in its log."""
    port = re.findall(r"--port (\d+)", log.read_text())[-1]
    commands = {int(file.parent.name): words(file) for file in Path("/proc").glob("[0-9]*/cmdline")}
    [found] = [pid for pid, command in commands.items() if port in command and "serve" in command]
    return found


def words(file: Path) -> list[str]:
    try:
        return file.read_text(errors="replace").split("\0")
    except OSError:  # it has ended meanwhile
        return []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_the_server_is_gone_and_the_results_are_continued(tmp_path, target, number):  # noqa: F811
    out, prompts = tmp_path / "out", tmp_path / "p.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(4)))
    command = [
        *("bench", target, "--workload", f"w={prompts}", "--concurrency", "1", "--methods", "none", "--device", "cpu"),
        *("--engine", "peagle-serve", "--max-tokens", "40", "--max-model-len", "200", "--threads", "1"),
        *("--warm-up", "0", "--no-report", "--output", out),
    ]
    many = [*command, "--repeats", "500"]
    log = out / "logs" / "peagle-serve-none-k0.log"
    process = subprocess.Popen([sys.executable, "-m", "peagle", *map(str, many)], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not (out / "results.jsonl").exists() or not read_results(out / "results.jsonl").arms:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "no arm was measured"
        time.sleep(0.1)
    server = server_of(log)
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    wait_until_gone(server)
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert f"ended by {number.name}; the same command goes on" in said
    kept = len(read_results(out / "results.jsonl").arms)
    assert 0 < kept < 500
    result = run_peagle(*command, "--repeats", kept + 1)
    assert result.exit_code == 0, result.output
    assert f"{kept} of {kept + 1} arms are in the results already" in result.stderr
    assert len(read_results(out / "results.jsonl").arms) == kept + 1
