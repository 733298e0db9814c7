"""FSDP2 on two gloo processes against one process with the same global batch, and checkpoints between the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter import load_drafter
from peagle.training.trainer import train_on

from .helpers import listed_answers, tiny_target
from .test_distributed import assert_same, run_on
from .test_trainer import config, metrics, quiet


@pytest.mark.parametrize("kind", ["p-eagle", pytest.param("eagle3", marks=pytest.mark.slow)])
def test_shards_train_as_one(tmp_path: Path, kind: str) -> None:
    # three packs a step: one process has two and the other one; the epoch's last step leaves one without any
    settings: dict[str, Any] = {
        "kind": kind, "max_steps": 20, "packs_per_step": 3, "chunk_size": 24, "lr": 2e-4, "log_every": 3,
        "ema_decay": 0.9, "draft_vocab_size": 40,
    }  # fmt: skip
    train_on(config(tmp_path / "one", **settings), tiny_target(), listed_answers(40), say=quiet)
    run_on(2, tmp_path / "two", settings | {"parallel": "fsdp"})
    assert_same(tmp_path / "one", tmp_path / "two")
    heads = [load_drafter(tmp_path / name / "head", kind=kind).state_dict() for name in ("one", "two")]  # type: ignore[arg-type]
    for name, weight in heads[0].items():
        torch.testing.assert_close(heads[1][name], weight, rtol=1e-2, atol=1e-6)  # bf16: a last place may differ


@pytest.mark.parametrize("packs", [2, 3])
def test_shards_in_bfloat16(tmp_path: Path, packs: int) -> None:
    # one pack in one chunk a process; with three packs one process has two of them, and in the epoch's last step none
    settings: dict[str, Any] = {"max_steps": 20, "packs_per_step": packs, "lr": 2e-4, "dtype": "bfloat16"}
    train_on(config(tmp_path / "one", **settings), tiny_target(), listed_answers(40), say=quiet)
    run_on(2, tmp_path / "two", settings | {"parallel": "fsdp"})
    for a, b in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    heads = [load_drafter(tmp_path / name / "head").state_dict() for name in ("one", "two")]
    for name, weight in heads[0].items():
        assert (heads[1][name] - weight).norm() <= 0.02 * weight.norm().clamp(min=1e-6), name


@pytest.mark.slow
def test_shards_go_on_as_one_and_back(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"packs_per_step": 2, "lr": 2e-4, "log_every": 2, "ema_decay": 0.9}
    train_on(config(tmp_path / "one", max_steps=18, **settings), tiny_target(), listed_answers(40), say=quiet)
    for steps, processes in ((6, 2), (12, 1), (18, 2)):
        part = settings | {"max_steps": 18, "parallel": "fsdp"}
        stop_after(tmp_path / "parts", steps, processes, part)
    assert_same(tmp_path / "one", tmp_path / "parts")
    assert metrics(tmp_path / "parts")[-1]["step"] == 18


def stop_after(output: Path, steps: int, processes: int, settings: dict[str, Any]) -> None:
    """Run to the end, then drop what came after a step, as if the run had been killed there."""
    run_on(processes, output, settings | {"save_every": 6, "keep_checkpoints": 10})
    for folder in (output / "checkpoints").iterdir():
        if int(folder.name.removeprefix("step-")) > steps:
            (folder / "state.pt").unlink()
            folder.rmdir()
