"""The benchmarks of long sequences run with tiny sizes, and count and compute what they say."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.training.partition import train_pack
from tests.load_benchmark import load

head, plain, long = load("long_head"), load("long_plain"), load("long_sequences")
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


def test_speculators_runs_at_tiny_sizes(tmp_path: Path) -> None:
    if importlib.util.find_spec("speculators") is None:
        pytest.skip("speculators is not installed")
    peer = load("long_speculators")
    results = peer.main(["-o", str(tmp_path), "--tiny", "--device", "cpu", "--first", "32", "--last", "64"])
    assert [row["length"] for row in results["lengths"]] == [32, 64]
    assert all(row["rows"] > 2 * row["length"] for row in results["lengths"])
    training = head.Training(TINY, torch.device("cpu"))
    assert results["trained_parameters"] == sum(p.numel() for p in training.parameters)
