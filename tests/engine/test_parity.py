from __future__ import annotations

import pytest
import torch

from peagle.engine.parity import Divergence, first_divergence, logit_gap
from peagle.target import Target
from tests.engine.helpers import SEQUENCES


def test_first_divergence() -> None:
    assert first_divergence([1, 2, 3], [1, 2, 3]) is None
    assert first_divergence([1, 2, 3], [1, 5, 3]) == Divergence(1, 2, 5)
    assert first_divergence([1, 2], [1, 2, 3]) == Divergence(2, None, 3)
    assert first_divergence([1, 2], [1]) == Divergence(1, 2, None)


def test_logit_gap(target: Target, plain: list[list[int]]) -> None:
    prompt, answer = SEQUENCES[3], plain[3]
    other = [*answer[:2], (answer[2] + 1) % 94]
    found = first_divergence(answer, other)
    assert found is not None
    logits = target.lm_logits(target.encode(torch.tensor([prompt + answer[:2]]), (0,)).hidden[0, -1])
    assert logit_gap(target, prompt, answer, found) == pytest.approx(float(logits[answer[2]] - logits[other[2]]))
    assert logits.argmax() == answer[2]
    assert logit_gap(target, prompt, answer, Divergence(2, answer[2], None)) == float("inf")
