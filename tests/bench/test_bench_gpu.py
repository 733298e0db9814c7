"""A small sweep on a GPU, the engine in this process."""

from __future__ import annotations

import json

import pytest
import torch

from tests.cli.conftest import heads, run_peagle, target  # noqa: F401  (fixtures)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def test_all_methods_on_a_gpu(tmp_path, target, heads):  # noqa: F811
    out = tmp_path / "out"
    result = run_peagle(
        *("bench", target, "--p-eagle", heads["p-eagle"], "--eagle3", heads["eagle3"], "--workload", "quick"),
        *("--k", "2,4", "--concurrency", "1,4", "--max-tokens", "24", "--dtype", "float32", "--max-num-seqs", "4"),
        *("--max-model-len", "512", "--engine-args", '{"num_kv_blocks": 400}', "--no-report", "--output", out),
    )
    assert result.exit_code == 0, result.output
    arms = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    arms = [arm for arm in arms if arm["type"] == "arm"]
    assert len(arms) == 10
    assert all(arm["failed"] == 0 and arm["completed"] == 8 for arm in arms)
    for arm in arms[1:]:
        first = arm["check"]["first"]
        assert first is None or (first["logit_gap"] is not None and first["logit_gap"] < 0.01)
