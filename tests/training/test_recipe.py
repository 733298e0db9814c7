"""Weights by depth, the moving average, and acceptance without repeating text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from peagle.config.training import TrainConfig
from peagle.drafter import load_drafter
from peagle.errors import InputError
from peagle.training.average import WeightAverage
from peagle.training.chunks import make_loss_rows
from peagle.training.loops import repeating
from peagle.training.trainer import train_on
from peagle.training.validate import joint_matches

from .helpers import ListedAnswers, ListedExample, listed_answers, tiny_target
from .test_trainer import config, metrics, quiet


def test_repeating_text_is_found_from_the_second_copy_on() -> None:
    rng = np.random.default_rng(0)
    text, block = rng.integers(0, 1000, 50), rng.integers(1000, 2000, 20)
    ids = np.concatenate((text, block, block, block[:7], text[:5] + 5000))
    found = repeating(ids)
    assert found.nonzero()[0].tolist() == list(range(70, 97))
    assert not repeating(text).any()
    assert repeating(np.full(30, 7)).sum() == 29
    assert not repeating(np.array([7] * 10)).any(), "too short to be called a loop"
    assert repeating(np.array([], dtype=np.int64)).shape == (0,)


def test_chains_in_loops_are_left_out() -> None:
    anchor, depth = torch.tensor([3, 3, 3, 8, 8, 9]), torch.tensor([0, 1, 2, 0, 1, 0])
    rows = make_loss_rows(anchor, anchor + depth + 1, depth, depth, torch.ones(6), anchor, 4)
    right = (rows.anchor == 8) | ((rows.anchor == 3) & (rows.depth != 1))
    assert joint_matches(rows, right, 3).tolist() == [[2.0, 1.0, 0.0], [3.0, 2.0, 1.0]]
    assert joint_matches(rows, right, 3, rows.anchor == 8).tolist() == [[1.0, 0.0, 0.0], [2.0, 1.0, 1.0]]


def test_validation_reports_loops(tmp_path: Path) -> None:
    examples = [ListedExample(np.tile(e.input_ids[:9], 5), np.arange(45) >= 2) for e in listed_answers(20).examples]
    train_on(config(tmp_path, max_steps=2), tiny_target(), ListedAnswers(examples), say=quiet)
    found = metrics(tmp_path)[-1]
    assert found["validation_loop_share"] > 0.7
    assert 1.0 <= found["validation_acceptance_length_without_loops"] <= 4.0


def test_average_follows_and_steps_aside() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    average = WeightAverage([weight], 0.9)
    for step in range(200):
        weight.data.fill_(1.0 + (step % 2))
        average.update(step)
    with average.in_place():
        assert torch.allclose(weight, torch.full((3,), 1.5), atol=0.1)
    assert torch.equal(weight.data, torch.full((3,), 2.0))


def test_average_is_written_and_resumed(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    settings: dict[str, object] = {"ema_decay": 0.95, "schedule": "wsd", "max_steps": 8}
    train_on(config(tmp_path / "plain", **(settings | {"ema_decay": None})), target, answers, say=quiet)
    train_on(config(tmp_path / "whole", **settings), target, answers, say=quiet)
    train_on(
        config(tmp_path / "part", **(settings | {"schedule": "cosine", "max_steps": 8})), target, answers, say=quiet
    )
    heads = [load_drafter(tmp_path / name / "head").fc.weight for name in ("plain", "whole", "part")]
    assert not torch.equal(heads[0], heads[1])
    assert not torch.equal(heads[1], heads[2])
    losses = [[line["loss"] for line in metrics(tmp_path / name) if "loss" in line] for name in ("plain", "whole")]
    assert losses[0] == losses[1], "the average does not touch training"
    train_on(config(tmp_path / "whole", **(settings | {"max_steps": 9})), target, answers, say=quiet)


def test_depth_decay_weighs_the_loss(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    for name, decay in (("plain", 1.0), ("decayed", 0.01)):
        train_on(config(tmp_path / name, depth_decay=decay, max_steps=1), target, answers, say=quiet)
    plain, decayed = metrics(tmp_path / "plain")[0], metrics(tmp_path / "decayed")[0]
    assert plain["depth_loss"] == decayed["depth_loss"]
    assert decayed["loss"] == pytest.approx(decayed["depth_loss"][0], rel=0.05)


def test_unreached_weight_weighs_the_loss(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    for name, weight in (("plain", 1.0), ("reached", 0.0)):
        train_on(config(tmp_path / name, unreached_weight=weight, max_steps=1), target, answers, say=quiet)
    plain, reached = metrics(tmp_path / "plain")[0], metrics(tmp_path / "reached")[0]
    assert plain["depth_loss"] == reached["depth_loss"]
    assert 0 < reached["loss"] < plain["loss"]  # depth 0 is always reached


def test_validation_says_how_far_chains_go(tmp_path: Path) -> None:
    train_on(config(tmp_path, max_steps=1), tiny_target(), listed_answers(40), say=quiet)
    (found,) = [line for line in metrics(tmp_path) if "validation_loss" in line]
    joint = found["validation_joint_without_loops"]
    assert joint == sorted(joint, reverse=True)
    assert found["validation_acceptance_length_without_loops"] == pytest.approx(1 + sum(joint))


def test_norm_flags_reach_the_head(tmp_path: Path) -> None:
    settings = config(tmp_path, kind="eagle3", fc_norm=True, norm_output=True, max_steps=2)
    train_on(settings, tiny_target(), listed_answers(40), say=quiet)
    head = load_drafter(tmp_path / "head").config
    assert head.fc_norm
    assert head.norm_output


def test_settings_are_checked_and_old_runs_are_not_refused() -> None:
    with pytest.raises(InputError, match="ema_decay"):
        config(Path("x"), ema_decay=1.5)
    with pytest.raises(InputError, match="depth_decay"):
        config(Path("x"), depth_decay=0.0)
    with pytest.raises(InputError, match="unreached_weight"):
        config(Path("x"), unreached_weight=-0.1)
    with pytest.raises(InputError, match=r"unreached_weight: got 0\.5, expected 1 with train_lm_head"):
        config(Path("x"), unreached_weight=0.5, train_lm_head=True)
    with pytest.raises(InputError, match="schedule"):
        config(Path("x"), schedule="linear")
    old = config(Path("x")).to_dict()
    del old["ema_decay"], old["schedule"]
    assert config(Path("x")).differences(old) == []
    assert TrainConfig(**(config(Path("x")).to_dict() | {"schedule": "wsd"})).differences(old)
