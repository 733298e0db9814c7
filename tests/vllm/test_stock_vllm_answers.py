"""Training data from a stock vLLM server on the CPU: the rows that the engine in the process gives.

VLLM_PYTHON names the Python of an environment with vLLM; without it this is skipped.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from peagle.bench.server_process import free_port, running_server
from peagle.data.dataset import open_dataset
from tests.vllm.published import call, write_tiny_target

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="needs stock vLLM: set VLLM_PYTHON to the Python of its environment"),
]
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


def read(folder: Path) -> dict[str, tuple[list[int], list[bool], str]]:
    dataset = open_dataset(folder)
    columns = zip(dataset.prompt_ids, dataset, dataset.finish_reasons, strict=True)
    return {key: (row.input_ids.tolist(), row.answer_mask.tolist(), reason) for key, row, reason in columns}


def test_vllm_answers_as_the_engine_does(tmp_path: Path) -> None:
    """Greedy, two turns, with a limit on loops; with one token a chunk and with eight."""
    target = write_tiny_target(tmp_path / "target", "qwen3-coder-30b")
    rows = [{"turns": [f"Tell me of ship {i}, please.", "And what then?"][: 1 + i % 2]} for i in range(10)]
    (tmp_path / "ships.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ["data", "generate", target, "--prompts", tmp_path / "ships.jsonl", "--max-tokens", 100, "--loop-limit", 2]
    call(*common, "-o", tmp_path / "here", "--device", "cpu", "--max-model-len", 300)
    assert {reason for _, _, reason in read(tmp_path / "here").values()} == {"length", "loop"}

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--port", str(port)]
    command += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "300", "--max-num-seqs", "8"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | CPU  # its environment, not ours
    for interval in ("1", "8"):
        log = tmp_path / f"vllm-{interval}.log"
        with running_server([*command, "--stream-interval", interval], url, log, env, 300):
            said = call(*common, "-o", tmp_path / interval, "--endpoint", url, "--concurrency", 4)
        assert "it tells token ids" in said
        assert read(tmp_path / interval) == read(tmp_path / "here")
