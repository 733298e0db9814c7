"""`peagle serve`: what it refuses, what it prints, and that SIGTERM ends it in order."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

import peagle
from peagle.config import EngineConfig
from tests.cli.conftest import run_peagle


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--async-scheduling"], "--async-scheduling"),
        (["--max-cudagraph-capture-size", 4096], "no CUDA graphs"),
        (["--kv-cache-dtype", "fp8"], "expected auto"),
        (["--speculative-config", "{"], "expected a JSON object"),
        (["--speculative-config", '{"method": "eagle3", "model": "x"}'], "num_speculative_tokens is missing"),
        (["--speculative-config", '{"method": "mtp", "model": "x", "num_speculative_tokens": 3}'], "method"),
        (["--block-size", 0], "block_size"),
    ],
)
def test_refused_before_anything_is_loaded(flags: list[object], says: str) -> None:
    result = run_peagle("serve", "no/such-model", *flags)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.skipif(hasattr(EngineConfig, "enable_prefix_caching"), reason="this engine has a prefix cache")
def test_prefix_caching_without_a_prefix_cache() -> None:
    result = run_peagle("serve", "no/such-model", "--enable-prefix-caching")
    assert result.exit_code == 2
    assert "no prefix cache" in result.output


def test_a_port_that_is_taken() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = run_peagle("serve", "no/such-model", "--port", taken.getsockname()[1])
    assert result.exit_code == 2
    assert "cannot listen on" in result.output


def test_a_head_of_the_other_kind(target: str, heads: dict[str, str]) -> None:
    speculative = {"method": "eagle3", "model": heads["eagle3"], "num_speculative_tokens": 3, "parallel_drafting": True}
    result = run_peagle(
        "serve", target, "--device", "cpu", "--port", 0, "--speculative-config", json.dumps(speculative)
    )
    assert result.exit_code == 2
    assert "parallel_drafting" in result.output or "p-eagle" in result.output.lower()


def test_serve_and_sigterm(target: str, heads: dict[str, str]) -> None:
    speculative = {
        "method": "eagle3",
        "model": heads["p-eagle"],
        "num_speculative_tokens": 6,
        "parallel_drafting": True,
    }
    command = [sys.executable, "-m", "peagle", "serve", target, "--speculative-config", json.dumps(speculative)]
    command += ["--port", "0", "--served-model-name", "tiny", "--device", "cpu", "--threads", "1"]
    # the blog's flags, as far as they mean something here
    command += ["--max-num-seqs", "4", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    command += ["--kv-cache-dtype", "auto", "--stream-interval", "20", "--no-async-scheduling"]
    source = str(Path(peagle.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        printed = ""
        while "listening" not in printed:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            printed += line
        assert re.search(r"target +.*float32 on cpu · served as tiny", printed)
        assert re.search(r"head +P-EAGLE.*K = 6", printed)
        assert re.search(r"KV cache +\d+ blocks of 16 · \d+ tokens", printed)
        assert re.search(r"limits +512 tokens a request · 4 requests at once", printed)
        assert re.search(r"warning +num_speculative_tokens 6 is more than the 4", printed)
        url = printed.split()[-1]
        body = {"prompt": [1, 2, 3], "max_tokens": 400, "ignore_eos": True, "stream": True, "min_tokens": 400}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


def test_without_the_extra_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peagle.server.run", None)
    result = run_peagle("serve", "no/such-model")
    assert result.exit_code == 2
    assert "peagle[server]" in result.output
