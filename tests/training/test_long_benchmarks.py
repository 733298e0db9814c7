"""The benchmarks of long sequences run with tiny sizes, and count and compute what they say."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.training.partition import train_pack
from tests.load_benchmark import load

head, plain, long = load("long_head"), load("long_plain"), load("long_sequences")
beside = load("long_beside")
TINY = load("long_common").TINY


def test_tiny_run_writes_table_and_plot(tmp_path: Path) -> None:
    arguments = ["-o", str(tmp_path), "--tiny", "--device", "cpu", "--lengths", "40,96", "--chunk-size", "32"]
    long.main([*arguments, "--flat-from", "16", "--flat-to", "32", "--attention-length", "64"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert [row["length"] for row in results["lengths"]] == [40, 96]
    assert [row["chunks"] for row in results["lengths"]] == [2, 3]
    assert [row["rows"] for row in results["flat"]] == [sum(n - d - 2 for d in range(1, 4)) + n for n in (16, 32)]
    assert all(row["tokens_per_second"] > 0 for row in results["lengths"] + results["flat"])
    assert results["attention"]["ours"]["forward_flops"] > 0
    assert results["matmul_flops"] > 0
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    kept = long.main([*arguments, "--parts", "matmul"])
    assert kept["lengths"] == results["lengths"], "a part alone leaves the others' results"


def test_flat_pass_and_partition_have_the_same_gradients() -> None:
    training = head.Training(TINY, torch.device("cpu"))
    table = head.sampled_rows(TINY, 61, 0.8)
    aux, hidden = training.states(61)
    gradients = []
    for size in (61, 16):
        chunks = head.make_chunks(training, table, size)
        if size == 61:
            plain.flat_loss(training, plain.by_depth(chunks[0]), aux, hidden).backward()
        else:
            train_pack(training.copy.compute, chunks, aux, training.chunk_loss(hidden), "dense")
        gradients.append(torch.cat([p.grad.flatten() for p in training.parameters]))
        training.forget()
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)


def test_allowed_pairs_are_those_of_the_mask() -> None:
    training = head.Training(TINY, torch.device("cpu"))
    (chunk,) = head.make_chunks(training, head.sampled_rows(TINY, 50, 0.8), 50)
    assert plain.allowed_pairs(chunk) == int(plain.PlainAttention(chunk).mask.sum())


def test_a_failure_is_a_result() -> None:
    def step() -> dict[str, Any]:
        raise torch.OutOfMemoryError("no more\nat all")

    row = load("long_common").until_it_fails(torch.device("cpu"), 64, step)
    assert row == {"length": 64, "failed": "out of memory", "message": "no more"}


def test_sides_beside_each_other_at_tiny_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2] / "src"), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arguments = ["-o", str(tmp_path), "--tiny", "--device", "cpu"]
    found = beside.main([*arguments, "--legs", "peagle:48 flat:16,32 speculators:48"])
    results = json.loads((tmp_path / "results.json").read_text())
    assert results == found
    assert [(row["length"], row["chunk_size"]) for row in results["peagle"]] == [(48, 32), (48, 16)]
    assert all(row["tokens_per_second"] > 0 and not row["compiled_while_measured"] for row in results["peagle"])
    assert [row["rows"] for row in results["flat"]] == [52, 116]
    (theirs,) = results["speculators"]
    if importlib.util.find_spec("speculators") is None:
        assert theirs["failed"] == "exit 1"
        assert "No module named 'speculators'" in (tmp_path / "speculators.log").read_text()
        return
    assert theirs["rows"] == results["peagle"][0]["rows"]
    assert results["sides"]["speculators"]["trained_parameters"] == results["sides"]["peagle"]["trained_parameters"]


@pytest.mark.parametrize(
    ("ending", "failed", "message"),
    [
        ("time.sleep(60)", "stopped", "point took over 3 s; last: warm-up step"),
        ("sys.exit(3)", "exit 3", "see x.log; last: warm-up step"),
    ],
)
def test_a_point_that_hangs_or_dies_is_written_down_and_the_next_goes_on(
    tmp_path: Path, ending: str, failed: str, message: str
) -> None:
    script = f"""
import json, sys, time
word = json.loads(sys.stdin.readline())
print(json.dumps({{"event": "begin", "length": word["lengths"][0]}}))
print("what a library prints")
print(json.dumps({{"event": "warm-up step", "seconds": 1}}))
sys.stdout.flush()
{ending}
"""
    results = beside.Results(tmp_path / "results.json", {})
    side = beside.Side("x", tmp_path / "x.log", [sys.executable, "-c", script])
    left = beside.follow(side, {"lengths": [8, 4, 2]}, results, 3, time.monotonic() + 60)
    side.stop()
    assert left == [4, 2]
    (row,) = json.loads((tmp_path / "results.json").read_text())["x"]
    assert row["length"] == 8
    assert row["failed"] == failed
    assert row["message"].startswith(message)
    assert "what a library prints" in (tmp_path / "x.log").read_text()


def test_warm_up_ends_with_a_step_that_compiles_nothing() -> None:
    common = load("long_common")
    compiled = torch.compile(lambda x: x + 1, backend="eager")
    told: list[dict[str, Any]] = []
    ranks = iter([1, 2, 3, 1, 2])

    def step() -> None:
        compiled(torch.ones([2] * next(ranks)))

    each = common.warm_up(torch.device("cpu"), step, 5, lambda event, **what: told.append(what))
    assert len(each) == len(told) == 4
