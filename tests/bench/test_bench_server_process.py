"""Servers that are started and stopped: a small Python program stands for them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from peagle.bench.arms import Setup
from peagle.bench.backends import same_dtype
from peagle.bench.server_commands import (
    caches_prefixes,
    common_args,
    peagle_command,
    server_env,
    speculative_settings,
    vllm_command,
)
from peagle.bench.server_process import ServerStartError, free_port, running_server
from peagle.errors import InputError
from peagle.target.text import read_target_text

HEALTHY = """
import http.server, signal, subprocess, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args): pass
{prepare}
print("ready", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def command(prepare: str, port: int) -> list[str]:
    return [sys.executable, "-c", HEALTHY.format(prepare=prepare), str(port)]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        with open(f"/proc/{pid}/stat") as file:  # a zombie is dead
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 20
    while alive(pid):
        if time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            pytest.fail("it still runs")
        time.sleep(0.05)


def test_it_runs_answers_and_is_gone_with_its_children(tmp_path):
    port, log = free_port(), tmp_path / "logs" / "server.log"
    child = 'child = subprocess.Popen(["sleep", "600"]); print("child", child.pid, flush=True)'
    with running_server(command(child, port), f"http://127.0.0.1:{port}", log, os.environ, 30):
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
    content = log.read_text()
    assert content.startswith("$ ")
    assert "ready" in content
    wait_until_gone(int(content.split("child ")[-1].split()[0]))
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def test_one_that_ends_shows_the_end_of_its_log(tmp_path):
    port = free_port()
    dies = 'print("out of memory: 3 GiB"); sys.exit(3)'
    with (
        pytest.raises(ServerStartError, match=r"(?s)ended with status 3 .*  \| out of memory: 3 GiB"),
        running_server(command(dies, port), f"http://127.0.0.1:{port}", tmp_path / "x.log", os.environ, 30),
    ):
        pass


def test_one_that_never_gets_ready_is_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.bench.server_process.STOP_SECONDS", 0.3)
    port, log = free_port(), tmp_path / "x.log"
    hangs = """
import os, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("pid", os.getpid(), flush=True)
time.sleep(600)
"""
    with (
        pytest.raises(ServerStartError, match="not ready after 2 s"),
        running_server(command(hangs, port), f"http://127.0.0.1:{port}", log, os.environ, 2),
    ):
        pass
    assert not alive(int(log.read_text().split("pid ")[-1].split()[0]))


def test_what_cannot_be_started(tmp_path):
    with (
        pytest.raises(ServerStartError, match="/no/such/program cannot be started"),
        running_server(["/no/such/program"], "http://127.0.0.1:1", tmp_path / "x.log", os.environ, 1),
    ):
        pass


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal: a run that a shell started in the background inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_stops_the_server_too(tmp_path, interruptible):
    port, log = free_port(), tmp_path / "x.log"
    pid = "import os; print('pid', os.getpid(), flush=True)"
    with (
        pytest.raises(KeyboardInterrupt),
        running_server(command(pid, port), f"http://127.0.0.1:{port}", log, os.environ, 30),
    ):
        signal.raise_signal(signal.SIGINT)
    assert not alive(int(log.read_text().split("pid ")[-1].split()[0]))


IN_A_PROCESS = """
import os, sys, time
from pathlib import Path
from peagle.bench.server_process import free_port, running_server
port = free_port()
command = [sys.executable, sys.argv[1], str(port)]
with running_server(command, f"http://127.0.0.1:{port}", Path(sys.argv[2]), os.environ, 60):
    print("runs", flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent is gone")
def test_a_kill_of_this_process_ends_the_server(tmp_path):
    log, program = tmp_path / "x.log", tmp_path / "server.py"
    program.write_text(HEALTHY.format(prepare="import os; print('pid', os.getpid(), flush=True)"))
    process = subprocess.Popen([sys.executable, "-c", IN_A_PROCESS, program, log], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"runs\n"
    server = int(log.read_text().split("pid ")[-1].split()[0])
    process.kill()
    process.communicate()
    wait_until_gone(server)


def test_a_second_interrupt_does_not_wait_for_a_server_that_goes_on(tmp_path, interruptible):
    port, log = free_port(), tmp_path / "x.log"
    stubborn = "import os; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid(), flush=True)"
    interrupt = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    with (
        pytest.raises(KeyboardInterrupt),
        running_server(command(stubborn, port), f"http://127.0.0.1:{port}", log, os.environ, 30),
    ):
        interrupt.start()
    assert not alive(int(log.read_text().split("pid ")[-1].split()[0]))


def test_another_thread_may_start_one(tmp_path):
    """It would be told that its parent is gone when that thread ends."""
    port, log = free_port(), tmp_path / "x.log"
    stack = contextlib.ExitStack()
    server = running_server(command("", port), f"http://127.0.0.1:{port}", log, os.environ, 30)
    thread = threading.Thread(target=stack.enter_context, args=(server,))
    thread.start()
    thread.join()
    with stack:
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200


def test_engines_are_told_the_same_dtype(target_folder):
    text = read_target_text(str(target_folder("llama")))
    assert same_dtype("auto", text, "cpu") == "float32"
    assert same_dtype("bfloat16", text, "cpu") == "bfloat16"


def test_commands(tmp_path, monkeypatch):
    settings = speculative_settings(Setup("vllm", "eagle3", 3), str(tmp_path), {"x": 1})
    assert settings == {
        "method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3, "parallel_drafting": False, "x": 1,
    }  # fmt: skip
    assert speculative_settings(Setup("vllm", "none", 0), None, {}) is None
    args = common_args(
        8123, [("--max-num-seqs", 64), ("--dtype", None), ("--max-model-len", 9)], ["--max-model-len", "5"]
    )
    assert args == [
        "--host", "127.0.0.1", "--port", "8123", "--no-enable-prefix-caching", "--max-num-seqs", "64",
        "--max-model-len", "5",
    ]  # fmt: skip
    cached = common_args(1, [], ["--enable_prefix_caching"])
    assert "--no-enable-prefix-caching" not in cached
    assert caches_prefixes(["--enable_prefix_caching"])
    assert not caches_prefixes(["--no-enable-prefix-caching"])
    ours = peagle_command("target", settings, args)
    assert ours[1:5] == ["-m", "peagle", "serve", "target"]
    assert '"parallel_drafting": false' in ours[6]
    assert "--no-dynamic-speculation" in ours  # arms are compared by K
    by_load = peagle_command("target", settings, [*args, "--dynamic-speculation"])
    assert "--no-dynamic-speculation" not in by_load
    assert "--no-dynamic-speculation" not in peagle_command("target", None, args)
    monkeypatch.setenv("PYTHONPATH", "here")
    assert server_env(ours)["PYTHONPATH"] == "here"
    assert "PYTHONPATH" not in server_env(["/elsewhere/bin/python", "-m", "vllm"])
    monkeypatch.setattr("peagle.vllm.serve.find_vllm", lambda: None)
    with pytest.raises(InputError, match="--engine vllm: vLLM is not installed here"):
        vllm_command("source", settings, args)
    with pytest.raises(InputError, match="--speculative-config"):
        vllm_command("source", settings, ["--speculative-config", "{}"])
