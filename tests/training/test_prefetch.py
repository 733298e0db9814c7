"""Batches made ahead of time are those of their steps, and errors arrive."""

from __future__ import annotations

import pytest
import torch

from peagle.training.prefetch import prefetch
from peagle.training.scan import scan_answers
from peagle.training.schedule import Schedule

from .helpers import ListedAnswers, listed_answers
from .test_batches import maker


def test_prefetch_starts_anywhere_and_hands_errors_over() -> None:
    answers = listed_answers(30)
    scan = scan_answers(answers, 64, 64)
    schedule = Schedule(scan.documents, scan.lengths, 64, 2, 0)
    make = maker(answers)
    everything = list(prefetch(make, schedule, 0, 12, False))
    later = list(prefetch(make, schedule, 9, 12, False))
    assert [b.step for b in later] == [9, 10, 11]
    for a, b in zip(everything[9:], later, strict=True):
        assert torch.equal(a.packs[0][0].token, b.packs[0][0].token)
        assert torch.equal(a.packs[0][0].loss.index, b.packs[0][0].loss.index)
    bad = maker(ListedAnswers([]))
    with pytest.raises(IndexError):
        list(prefetch(bad, schedule, 0, 1, False))
