"""Runs killed with SIGKILL, also while a checkpoint is written, reach the uninterrupted run's weights bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter import load_drafter
from peagle.training.checkpoints import checkpoint_folders, load_latest, save_checkpoint

from .test_trainer import metrics

TESTS = Path(__file__).resolve().parents[1]


def killed_runs(folder: Path, kills: int, seed: int) -> dict[str, Any]:
    env = dict(os.environ) | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent / "src"), str(TESTS)))}
    command = [sys.executable, "-W", "ignore", "-m", "training.kill_child", str(folder), str(kills), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def assert_same_end(folder: Path, whole: Path) -> None:
    mine, other = load_latest(folder / "checkpoints"), load_latest(whole / "checkpoints")
    assert mine is not None
    assert other is not None
    for name in ("drafter", "optimizer", "rng", "step"):
        torch.testing.assert_close(mine[name], other[name], rtol=0, atol=0)
    head, whole_head = (load_drafter(path / "head").state_dict() for path in (folder, whole))
    torch.testing.assert_close(head, whole_head, rtol=0, atol=0)
    assert metrics(folder) == metrics(whole)
    assert not list((folder / "checkpoints").glob(".writing-*")), "nothing is left of unfinished checkpoints"


def test_every_resume_reaches_the_same_weights(tmp_path: Path) -> None:
    found = killed_runs(tmp_path, kills=20, seed=0)
    assert sum(found["kills"].values()) == 20
    assert set(found["kills"]) == {"moment", "checkpoint", "operation"}
    for run in range(found["runs"]):
        assert_same_end(tmp_path / f"run-{run}", tmp_path / "whole")


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, step, {"step": step, "weights": torch.arange(1000.0)}, keep=2)
    newest = checkpoint_folders(tmp_path)[0] / "state.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1  # in the middle of the weights, where nothing else would show it
    newest.write_bytes(content)
    with pytest.warns(UserWarning, match="step-00000002 cannot be read and is passed over .*checksum"):
        state = load_latest(tmp_path)
    assert state is not None
    assert state["step"] == 1


def test_rewriting_a_step_never_leaves_it_half_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, 1, {"step": 1, "try": 1}, keep=1)
    real = os.replace

    def crash(source: Path, place: Path) -> None:
        if Path(place).name == "step-00000001":
            raise KeyboardInterrupt
        real(source, place)

    monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, 1, {"step": 1, "try": 2}, keep=1)
    monkeypatch.undo()
    save_checkpoint(tmp_path, 1, {"step": 1, "try": 3}, keep=1)
    assert load_latest(tmp_path) == {"step": 1, "try": 3}
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
