"""`peagle serve`: what it refuses, what it prints, and that SIGTERM ends it in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import LlamaConfig, MambaConfig

import peagle
from peagle.cli.serve import api_keys
from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.errors import InputError
from tests.cli.conftest import run_peagle
from tests.conftest import COMMON


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--max-cudagraph-capture-size", -1], "max-cudagraph-capture-size"),
        (["--kv-cache-dtype", "int4"], "kv_cache_dtype: got 'int4'"),
        (["--max-logprobs", -2], "max-logprobs"),
        (["--speculative-config", "{"], "expected a JSON object"),
        (["--speculative-config", '{"method": "eagle3", "model": "x"}'], "num_speculative_tokens is missing"),
        (["--speculative-config", '{"method": "mtp", "model": "x", "num_speculative_tokens": 3}'], "method"),
        (["--block-size", 0], "block_size"),
        (["--api-key", ""], "--api-key: got a key that is empty"),
        (["--tensor-parallel-size", 2], "go with --engine vllm"),
        (["--allowed-origins", "*"], "--allowed-origins: not JSON"),
        (["--allowed-origins", '"*"'], "expected a JSON list of strings"),
    ],
)
def test_refused_before_anything_is_loaded(flags: list[object], says: str) -> None:
    result = run_peagle("serve", "no/such-model", *flags)
    assert result.exit_code == 2
    assert says in result.output


# the blog's own, with `peagle serve` in place of `vllm serve`
BLOG = """
peagle serve openai/gpt-oss-20b \\
    --speculative-config '{
      "method": "eagle3",
      "model": "amazon/GPT-OSS-20B-P-EAGLE",
      "num_speculative_tokens": 7,
      "parallel_drafting": true}' \\
    --port 8000 \\
    --max-num-seqs 1024 \\
    --max-model-len 100000 \\
    --max-num-batched-tokens 100000 \\
    --max-cudagraph-capture-size 4096 \\
    --no-enable-prefix-caching \\
    --no-enable-chunked-prefill \\
    --kv-cache-dtype fp8 \\
    --async-scheduling \\
    --stream-interval 20
"""


class Stop(Exception):
    pass


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the command would load; nothing is."""
    found: dict[str, Any] = {}

    def take(model: str, speculative: object, dtype: str, device: object, config: object) -> None:
        found.update(model=model, speculative=speculative, config=config)
        raise Stop

    monkeypatch.setattr("peagle.engine.loading.load_engine", take)
    monkeypatch.setattr("peagle.server.run.bind", lambda host, port: found.update(address=(host, port)))
    return found


def test_the_blogs_command(loaded: dict[str, Any]) -> None:
    result = run_peagle(*shlex.split(BLOG.replace("\\\n", " "))[1:])
    assert isinstance(result.exception, Stop), result.output
    assert loaded["model"] == "openai/gpt-oss-20b"
    assert loaded["address"] == ("127.0.0.1", 8000)
    assert loaded["speculative"] == SpeculativeConfig(
        "amazon/GPT-OSS-20B-P-EAGLE", num_speculative_tokens=7, parallel_drafting=True
    )
    assert loaded["config"] == EngineConfig(
        max_num_seqs=1024,
        max_model_len=100_000,
        max_num_batched_tokens=100_000,
        max_cudagraph_capture_size=4096,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        kv_cache_dtype="fp8",
        async_scheduling=True,
        dynamic_speculation=None,
    )


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        ([], {}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--max-cudagraph-capture-size", 0], {"enforce_eager": True}),
        (["--kv-cache-dtype", "fp8_e4m3"], {"kv_cache_dtype": "fp8"}),
        (["--max-logprobs", -1], {"max_logprobs": -1}),
        (["--enable-prefix-caching", "--enable-chunked-prefill"], {}),
        (["--dynamic-speculation"], {"dynamic_speculation": True}),
        (["--no-dynamic-speculation"], {"dynamic_speculation": False}),
    ],
)
def test_flags(loaded: dict[str, Any], flags: list[object], config: dict[str, Any]) -> None:
    run_peagle("serve", "some/model", *flags)
    assert loaded["config"] == EngineConfig(**({"dynamic_speculation": None} | config))


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
    assert "kind: is eagle3, expected p-eagle" in result.output


def test_what_cannot_run_is_refused_before_weights_are_read(
    heads: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr("peagle.engine.loading.load_target", never)
    LlamaConfig(**COMMON | {"hidden_size": 64}).save_pretrained(tmp_path / "other")
    speculative = {"model": heads["eagle3"], "num_speculative_tokens": 3}
    result = run_peagle("serve", tmp_path / "other", "--port", 0, "--speculative-config", json.dumps(speculative))
    assert result.exit_code == 2
    assert f"head {heads['eagle3']} does not fit {tmp_path / 'other'}:\n  head: target_hidden_size 32" in result.output
    MambaConfig(**COMMON).save_pretrained(tmp_path / "recurrent")
    result = run_peagle("serve", tmp_path / "recurrent", "--port", 0)
    assert result.exit_code == 2
    assert "has layers of type linear_attention" in result.output


def test_serve_and_sigterm(target: str, heads: dict[str, str]) -> None:
    speculative = {
        "method": "eagle3",
        "model": heads["p-eagle"],
        "num_speculative_tokens": 6,
        "parallel_drafting": True,
    }
    command = [sys.executable, "-m", "peagle", "serve", target, "--speculative-config", json.dumps(speculative)]
    command += ["--port", "0", "--served-model-name", "tiny", "--device", "cpu", "--threads", "1"]
    # the blog's flags
    command += ["--max-num-seqs", "4", "--no-enable-prefix-caching", "--no-enable-chunked-prefill"]
    command += ["--max-num-batched-tokens", "512", "--max-cudagraph-capture-size", "4096"]
    command += ["--kv-cache-dtype", "fp8", "--stream-interval", "20", "--async-scheduling"]
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
        assert re.search(r"head +.* P-EAGLE.*K = 0 to 6, by load", printed)
        assert re.search(r"KV cache +\d+ blocks of 16 · \d+ tokens · fp8 · without prefix caching", printed)
        assert re.search(
            r"limits +512 tokens a request · 4 requests at once · 512 tokens .* · a prompt in one", printed
        )
        assert re.search(r"warning +num_speculative_tokens 6 is more than the 4", printed)
        assert re.search(r"warning +--async-scheduling changes nothing on a CPU", printed)
        assert re.search(r"warning +--max-cudagraph-capture-size changes nothing on a CPU", printed)
        assert "BENCHMARK ONLY" not in printed
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


def test_keys_of_flags_and_environment() -> None:
    assert api_keys(None, {}) == ()
    assert api_keys(["a", "b"], {"PEAGLE_API_KEY": "c"}) == ("a", "b")
    assert api_keys(None, {"PEAGLE_API_KEY": "my secret", "VLLM_API_KEY": "other"}) == ("my secret",)
    assert api_keys([], {"VLLM_API_KEY": "other"}) == ("other",)
    for given, environ, name in (
        ([""], {}, "--api-key"),
        (["a", " "], {}, "--api-key"),
        (None, {"PEAGLE_API_KEY": ""}, "PEAGLE_API_KEY"),
        (None, {"VLLM_API_KEY": "secret\n"}, "VLLM_API_KEY"),
    ):
        with pytest.raises(InputError, match=f"^{name}: got a key that is empty or has spaces around it"):
            api_keys(given, environ)


def test_a_signal_between_listening_and_serving_ends_in_order() -> None:
    code = """
import os, signal
from peagle.server.run import DrainingServer, end_on_signals
import uvicorn
class Loop: draining, num_taken = False, 0
loop = Loop()
async def app(scope, receive, send): pass
server = DrainingServer(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"), loop, 5.0)
end_on_signals(server)
os.kill(os.getpid(), signal.SIGTERM)
server.run()
print("ended", loop.draining)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "ended True\n"), done.stderr
