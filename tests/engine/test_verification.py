from __future__ import annotations

import pytest
import torch

from peagle.engine import verification
from peagle.engine.verification import verify


def test_longest_agreeing_prefix_then_the_targets_own() -> None:
    choices = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]])
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3], [1, 2, 3]])
    tokens, accepted = verify(choices, drafts, torch.tensor([3, 3, 3, 2, 0]))
    assert accepted.tolist() == [3, 1, 0, 2, 0]
    kept = [row[: n + 1] for row, n in zip(tokens.tolist(), accepted.tolist(), strict=True)]
    assert kept == [[1, 2, 3, 4], [1, 2], [1], [1, 2, 3], [1]]


def test_accepted_tokens_are_the_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the rule is: the keys and values that stand in the cache are the drafts'."""
    monkeypatch.setattr(verification, "accepts", lambda choices, drafts: torch.ones_like(drafts, dtype=torch.bool))
    tokens, accepted = verification.verify(torch.tensor([[1, 2, 3]]), torch.tensor([[7, 8]]), torch.tensor([2]))
    assert tokens.tolist() == [[7, 8, 3]]
    assert accepted.tolist() == [2]
