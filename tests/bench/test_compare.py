from collections.abc import Callable

import pytest
import torch

from peagle.bench.compare import describe, difference
from peagle.target.model import Target


def test_equal():
    assert difference(None, 0, 0, [1], [2, 3], [2, 3]) is None


def test_gap_is_the_targets(tiny_target: Callable[[str], Target]):
    target = tiny_target("llama")
    found = difference(target, 2, 1, [10, 11], [20, 21, 22], [20, 30])
    assert found is not None
    logits = target.model(torch.tensor([[10, 11, 20]])).logits[0, -1]
    assert found.logit_gap == pytest.approx(abs(float(logits[21] - logits[30])), abs=1e-4)
    assert describe(found).startswith("prompt 3, turn 2: token 2 differs, logit gap there ")


def test_an_end_is_a_difference(tiny_target: Callable[[str], Target]):
    found = difference(tiny_target("llama"), 0, 0, [1], [2, 3], [2])
    assert found is not None
    assert (found.index, found.plain_token, found.other_token, found.logit_gap) == (1, 3, None, None)
    assert describe(found) == "prompt 1: one of the two answers ends before token 2"
