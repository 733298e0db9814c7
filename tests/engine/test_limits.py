"""What one request asks for beyond a limit: it is refused, or it ends alone."""

from __future__ import annotations

import logging
from typing import Any, Literal

import pytest

from peagle.config.speculative import SpeculativeConfig
from peagle.engine import SamplingParams
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, assert_same, drain, greedy, make_engine, run, tiny_head


@pytest.mark.parametrize("min_tokens", [64 - 17 + 1, 1000, 2**63, 10**30])
def test_more_min_tokens_than_there_is_room(target: Target, min_tokens: int) -> None:
    engine = make_engine(target, max_model_len=64)
    params = SamplingParams(max_tokens=None, min_tokens=min_tokens)
    with pytest.raises(InputError, match=f"^min_tokens: got {min_tokens}, expected at most 47"):
        engine.add_request("0", SEQUENCES[4], params)
    assert not engine.has_unfinished


def test_as_many_min_tokens_as_there_is_room(target: Target) -> None:
    engine = make_engine(target, max_model_len=64)
    (request,) = run(engine, [SEQUENCES[4]], greedy(200, min_tokens=47, ignore_eos=False))
    assert len(request.token_ids) == 64


@pytest.mark.parametrize("kind", [None, "p-eagle"])
def test_a_value_that_no_lane_can_hold_ends_its_request_alone(
    target: Target, plain: list[list[int]], kind: str | None
) -> None:
    """Nothing of the kind gets past the checks; should it, the others go on."""
    engine = make_engine(target, None if kind is None else tiny_head(target, kind), 0 if kind is None else 3)
    first = engine.add_request("first", SEQUENCES[4], greedy(12))
    engine.step()
    bad = greedy(5)
    object.__setattr__(bad, "seed", 2**70)
    wrong = engine.add_request("wrong", SEQUENCES[1], bad)
    last = engine.add_request("last", SEQUENCES[5], greedy(12))
    outputs = drain(engine)
    (told,) = [output for output in outputs if output.request_id == "wrong"]
    assert (told.finished, told.finish_reason, told.new_token_ids) == (True, "error", [])
    assert isinstance(told.error, OverflowError)
    assert wrong.finish_reason == "error"
    for request, index in ((first, 4), (last, 5)):
        assert_same(target, SEQUENCES[index], plain[index][:12], request.output_token_ids)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.requests


def test_alone_it_ends_too(target: Target) -> None:
    engine = make_engine(target)
    bad = greedy(5)
    object.__setattr__(bad, "seed", 2**70)
    engine.add_request("wrong", SEQUENCES[1], bad)
    assert [output.finish_reason for output in engine.step()] == ["error"]
    assert not engine.has_unfinished
    assert engine.step() == []


def test_lengths_that_the_head_was_not_trained_for(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_engine(target, tiny_head(target, max_train_length=128), 2)
        make_engine(target, tiny_head(target), 2)  # it does not say
        assert make_engine(target, tiny_head(target, max_train_length=100), 2).draft_window == 100
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        make_engine(target, tiny_head(target, max_train_length=100), 2, draft_window=None)
    assert "trained on texts of up to 100 tokens and sees up to 128 (draft_window)" in caplog.text


@pytest.mark.parametrize(
    ("asked", "trained", "said", "window"),
    [
        ("auto", None, None, None),
        ("auto", 100, None, 100),
        ("auto", 128, None, None),
        ("auto", 100, 50, 50),
        ("auto", 100, 500, None),
        (16, 100, 50, 16),
        (16, None, None, 16),
        (None, 100, 50, None),
    ],
)
def test_what_the_drafter_sees(
    target: Target, asked: int | Literal["auto"] | None, trained: int | None, said: int | None, window: int | None
) -> None:
    head = tiny_head(target, max_train_length=trained, draft_window=said)
    engine = make_engine(target, head, 2, draft_window=asked)
    assert engine.draft_window == window
    assert engine.runner.draft_pass is not None
    assert engine.runner.draft_pass.window == window


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "all"])
def test_a_window_that_is_none(target: Target, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"^draft_window: got .*, expected a positive integer, 'auto' or null"):
        make_engine(target, tiny_head(target), 2, draft_window=wrong)
    with pytest.raises(InputError, match=r"^draft_window: got"):
        SpeculativeConfig("head", 2, draft_window=wrong)
