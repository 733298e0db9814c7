"""A step that is told to stop leaves a run as if the step had not begun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.training import target_states
from peagle.training.batches import StepBatch
from peagle.training.distributed import World
from peagle.training.prepare import Run, prepare
from peagle.training.step import never, train_step

from .helpers import listed_answers, tiny_target
from .test_trainer import config, quiet


def run_of(output: Path, **settings: Any) -> tuple[Run, StepBatch]:
    """A run of two packs a step in three chunks each, and its first step's batch."""
    run = prepare(config(output, chunk_size=24, **settings), tiny_target(), listed_answers(40), quiet, World())
    return run, run.plan.maker.make(0, run.plan.schedule.epoch(0)[0], stream=0)


def step_of(run: Run, batch: StepBatch, stop: Callable[[], bool]) -> torch.Tensor | None:
    return train_step(run.plan, run.weights, run.target_states, run.state, batch, 1e-3, stop=stop)


def after(questions: int) -> Callable[[], bool]:
    """Says that the run is to stop once it has been asked so often."""
    asked: list[None] = []

    def stop() -> bool:
        asked.append(None)
        return len(asked) > questions

    return stop


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("questions", [0, 2, 4, 6])  # before the first pack, within it, before and within the second
def test_a_step_that_is_given_up_leaves_nothing(tmp_path: Path, questions: int, dtype: str) -> None:
    settings: dict[str, Any] = {"dtype": dtype, "ema_decay": 0.9}
    whole, batch = run_of(tmp_path / "whole", **settings)
    assert step_of(whole, batch, never) is not None
    parts, same = run_of(tmp_path / "parts", **settings)
    before = [p.detach().clone() for p in parts.weights.parameters]
    assert step_of(parts, same, after(questions)) is None
    assert all(torch.equal(p, was) for p, was in zip(parts.weights.parameters, before, strict=True))
    assert (parts.state.sums.steps, parts.state.sums.tokens, float(parts.state.sums.stats.sum())) == (0, 0, 0.0)
    assert step_of(parts, same, never) is not None
    assert all(map(torch.equal, parts.weights.parameters, whole.weights.parameters))
    assert torch.equal(parts.state.sums.stats, whole.state.sums.stats)
    assert torch.equal(parts.state.sums.loss, whole.state.sums.loss)


def test_the_target_does_not_run_for_a_pack_that_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_states, "ENCODE_BYTES", 0)  # states of one pack at a time, as of long ones
    run, batch = run_of(tmp_path)
    real, encoded = target_states.encode_packs, []

    def encode(*more: Any) -> Any:
        encoded.append(None)
        return real(*more)

    monkeypatch.setattr(target_states, "encode_packs", encode)
    assert step_of(run, batch, lambda: len(encoded) == 1) is None
    assert step_of(run, batch, lambda: True) is None
    assert len(encoded) == 1
