"""The benchmarks of a step and of real shapes run with tiny sizes, and count what they say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from peagle.config.engine import EngineConfig
from peagle.engine import Engine
from tests.load_benchmark import load

engine_step, shapes = load("engine_step"), load("shapes")
TINY = ["--shape", "tiny", "--device", "cpu", "--dtype", "float32", "--concurrency", "1,2", "--prompt-tokens", "8"]


def results_of(module: ModuleType, monkeypatch: pytest.MonkeyPatch, path: Path, *more: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(sys, "argv", ["x", *TINY, "--json", str(path), *more])
    module.main()
    found: list[dict[str, Any]] = json.loads(path.read_text())["results"]
    return found


def test_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(engine_step, "product_rate", lambda *_: 1e9)
    monkeypatch.setattr(engine_step, "bandwidth", lambda *_: 1e9)
    found = results_of(engine_step, monkeypatch, tmp_path / "x.json", "--steps", "2", "--rounds", "2")
    assert [row["concurrency"] for row in found] == [1, 2] * 3
    assert all(row["floor_ms"] > 0 for row in found)
    assert all(2 <= row["acceptance_length"] <= 4 for row in found if row["head"]["kind"] != "plain")


def test_chains_are_read_from_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from peagle.kernels import chained_layer
    from peagle.kernels.skinny_linear import Config

    monkeypatch.setattr(chained_layer, "_chain", None)
    path = tmp_path / "chain.json"
    path.write_text(json.dumps({"chain": [["gated", 96, 64, list(Config(64, 64, 5))]]}))
    engine_step.use_chain_of(str(path))
    assert chained_layer._chain == chained_layer.Chain({("gated", 96, 64): Config(64, 64, 5)})
    path.write_text("{}")
    with pytest.raises(SystemExit, match="expected none, default or"):
        engine_step.use_chain_of(str(path))


@pytest.mark.parametrize(("kind", "rows", "drafts"), [("p-eagle", 6, 3), ("eagle3", 4, 1)])
def test_what_a_step_reads_and_computes(kind: str, rows: int, drafts: int) -> None:
    import torch

    shape = engine_step.SHAPES["tiny"]
    target = engine_step.make_target(shape, 64, torch.device("cpu"), torch.float32)
    head = engine_step.Head(kind, 2, 3)
    drafter = engine_step.make_drafter(head, target, shape, 64)
    engine = Engine(target, drafter, 3, EngineConfig(max_model_len=64, max_num_seqs=2))
    first, second, *more = engine_step.passes_of(engine, head, 2, contexts=10)
    layers, lm_head = sum(p.numel() for p in target.layers.parameters()), 320 * 64
    position = 2 * 2 * 16 * 4  # keys and values of one layer
    assert first.bytes == 4 * (layers + lm_head) + 10 * 7 * position
    assert first.operations == 2 * 2 * 4 * (layers + lm_head)
    own = sum(p.numel() for p in drafter.layers.parameters())
    assert second.bytes == 4 * (own + drafter.fc.weight.numel() + lm_head) + 10 * 2 * position
    assert second.operations == 2 * 2 * (rows * (own + drafter.fc.weight.numel()) + drafts * lm_head)
    assert len(more) == (2 if kind == "eagle3" else 0)


def test_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    more = ("--arms", "plain,p-eagle:2:3:2.5", "--output-tokens", "8", "--repeats", "2")
    found = results_of(shapes, monkeypatch, tmp_path / "x.json", *more)
    assert [(row["arm"], row["concurrency"]) for row in found] == [
        ("plain", 1), ("plain", 2), ("p-eagle 2L K=3", 1), ("p-eagle 2L K=3", 2),
    ]  # fmt: skip
    assert all(len(row["tokens_per_second"]) == 2 for row in found)
    with pytest.raises(SystemExit, match="expected plain or KIND"):
        shapes.Arm.parse("p-eagle:2:3:x")
