"""Drafts that the drafter itself does not trust are not verified, and no output depends on it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.drafter import Drafter
from peagle.engine import Engine
from peagle.engine.checks import check_threshold
from peagle.engine.drafting import DraftPass
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, assert_same, greedy, run, tiny_head

K = 5
# random heads over 256 tokens are never sure: nearly every draft, some, and hardly any reach these
THRESHOLDS = (1e-9, 1e-4, 0.02)


def engine_with(target: Target, drafter: Drafter, threshold: float, **config: Any) -> Engine:
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128} | config
    return Engine(target, drafter, K, EngineConfig(**settings), confidence_threshold=threshold)


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_greedy_output_is_plain_decodings(
    target: Target, plain: list[list[int]], kind: str, batch: int, threshold: float
) -> None:
    engine = engine_with(target, tiny_head(target, kind), threshold, max_num_seqs=batch)
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(40)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_fewer_drafts_the_higher_the_threshold(target: Target, kind: str) -> None:
    verified = []
    for threshold in (0.0, *THRESHOLDS):
        engine = engine_with(target, tiny_head(target, kind), threshold)
        run(engine, SEQUENCES, greedy(40))
        verified.append(engine.stats.spec.num_draft_tokens)
    assert verified == sorted(verified, reverse=True)
    assert verified[0] > verified[2] > verified[3]


def draft_pass(target: Target, kind: str, threshold: float) -> DraftPass:
    return DraftPass(tiny_head(target, kind), K, 8, 16, 128, confidence_threshold=threshold)


def test_joint_probability_decides(target: Target) -> None:
    """0.5 x 0.5 reaches a quarter, 0.5 x 0.4 does not; a request never gets more than it wants."""
    found = draft_pass(target, "p-eagle", 0.25)
    probs = torch.tensor([[0.5, 0.5, 0.99], [0.5, 0.4, 1.0], [0.2, 1.0, 1.0], [1.0, 1.0, 1.0]])
    wanted = torch.tensor([3, 3, 3, 2])
    assert found._trusted(probs, wanted).tolist() == [2, 1, 0, 2]
    assert found._trusted(None, wanted).tolist() == wanted.tolist()


def test_probabilities_are_the_drafters(target: Target) -> None:
    found = draft_pass(target, "p-eagle", 0.5)
    rows = torch.randn(4, target.hidden_size)
    tokens, probs = found._draft(rows, fixed_shape=False)
    best = found.drafter.logits(rows).softmax(dim=-1).max(dim=-1)
    torch.testing.assert_close(probs, best.values)
    assert tokens.tolist() == best.indices.tolist()
    assert found._draft(rows, fixed_shape=True)[1] is None


def test_eagle3_stops_when_nobody_goes_on(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass is not run for drafts that would not be verified."""
    passes = []
    forward = DraftPass._forward

    def counted(self: DraftPass, *args: Any) -> Any:
        passes.append(1)
        return forward(self, *args)

    monkeypatch.setattr(DraftPass, "_forward", counted)
    counts = []
    for threshold in (0.0, 0.999):
        passes.clear()
        run(engine_with(target, tiny_head(target, "eagle3"), threshold), SEQUENCES[:1], greedy(20))
        counts.append(len(passes))
    assert counts[0] > 3 * counts[1]


@pytest.mark.parametrize("value", [-0.1, 1.0, "0.5", True, math.nan])
def test_threshold_out_of_range(value: Any) -> None:
    with pytest.raises(InputError, match=r"confidence_threshold: got .*, expected a number from 0 to less than 1"):
        SpeculativeConfig("head", 3, confidence_threshold=value)


def test_refused_where_it_cannot_hold() -> None:
    with pytest.raises(InputError, match=r"confidence_threshold: got 0\.1 on cuda"):
        check_threshold(0.1, torch.device("cuda"), False)
    with pytest.raises(InputError, match=r"confidence_threshold: got 0\.1 beside dynamic_speculation"):
        check_threshold(0.1, torch.device("cpu"), True)
    check_threshold(0.0, torch.device("cuda"), True)
