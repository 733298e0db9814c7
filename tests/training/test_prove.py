"""FlexAttention that fails before a run: compiled layers go first, then dense attention takes its place."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.errors import InputError
from peagle.training import prove
from peagle.training.distributed import World
from peagle.training.prepare import Run, prepare
from peagle.training.prove import prove_attention
from peagle.training.step import train_step

from .helpers import listed_answers, tiny_target
from .test_trainer import config, quiet


def on_flex(output: Path, **settings: Any) -> Run:
    """A run on the CPU that takes its device to have FlexAttention."""
    run = prepare(config(output, **settings), tiny_target(), listed_answers(40), quiet, World())
    plan = run.plan
    run.plan = replace(plan, backend="flex", maker=replace(plan.maker, row_multiple=128))
    return run


def test_dense_attention_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = prepare(config(tmp_path), tiny_target(), listed_answers(40), quiet, World())
    monkeypatch.setattr(prove, "pack_gradients", None)
    assert prove_attention(run.plan, run.weights, run.target_states, 0) is run.plan


def test_what_fails_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_flex(tmp_path)
    run.weights.fused = True
    tried: list[bool] = []

    def fail(_plan: Any, weights: Any, *_: Any) -> None:
        tried.append(weights.fused)
        run.weights.parameters[0].grad = torch.ones_like(run.weights.parameters[0])
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(prove, "pack_gradients", fail)
    with (
        pytest.warns(UserWarning, match="a compiled layer failed, .* no such kernel"),
        pytest.warns(UserWarning, match="FlexAttention failed, dense attention takes its place .* no such kernel"),
    ):
        plan = prove_attention(run.plan, run.weights, run.target_states, 0)
    assert tried == [True, False]
    assert (plan.backend, plan.maker.row_multiple) == ("dense", 1)
    assert (plan.maker.chunk_size, plan.maker.slice_rows) == (plan.sizes.chunk_size, plan.sizes.loss_rows)
    assert len(plan.validation) == len(run.plan.validation)
    assert all(p.grad is None for p in run.weights.parameters), "nothing of the trial is left"
    batch = plan.maker.make(0, plan.schedule.epoch(0)[0], stream=1)
    assert train_step(plan, run.weights, run.target_states, run.state, batch, 1e-3).isfinite()


def test_flash_gives_way_to_flex(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_flex(tmp_path)
    run.plan = replace(run.plan, backend="flash")
    run.weights.fused = True
    tried: list[str] = []

    def fail(plan: Any, *_: Any) -> None:
        tried.append(plan.backend)
        if plan.backend == "flash":
            raise RuntimeError("no such kernel")

    monkeypatch.setattr(prove, "pack_gradients", fail)
    with pytest.warns(UserWarning, match="FlashAttention 4 failed, FlexAttention takes its place .* no such kernel"):
        plan = prove_attention(run.plan, run.weights, run.target_states, 0)
    assert (tried, plan.backend, run.weights.fused) == (["flash", "flex"], "flex", True)
    run.plan = replace(run.plan, config=replace(run.plan.config, attention="flash"))
    with pytest.raises(RuntimeError, match="no such kernel"):
        prove_attention(run.plan, run.weights, run.target_states, 0)


def test_flex_that_was_asked_for_must_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = on_flex(tmp_path)
    run.plan = replace(run.plan, config=replace(run.plan.config, attention="flex"))
    errors = iter((RuntimeError("no such kernel"), InputError("too large"), torch.OutOfMemoryError("full")))

    def fail(*_: Any) -> None:
        raise next(errors)

    monkeypatch.setattr(prove, "pack_gradients", fail)
    for error in (RuntimeError, InputError, torch.OutOfMemoryError):
        with pytest.raises(error):
            prove_attention(run.plan, run.weights, run.target_states, 0)
