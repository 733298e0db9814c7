"""What one look at the documents finds, and which of them validate."""

from __future__ import annotations

import numpy as np
import pytest

from peagle.errors import InputError
from peagle.training.scan import scan_answers, split_validation

from .helpers import ListedAnswers, ListedExample, listed_answers


def test_scan_counts_what_it_skips() -> None:
    def example(length: int, answer_from: int) -> ListedExample:
        return ListedExample(np.arange(3, 3 + length, dtype=np.int32), np.arange(length) >= answer_from)

    answers = ListedAnswers([example(1, 0), example(10, 10), example(40, 5), example(12, 2), example(30, 25)])
    scan = scan_answers(answers, 20, 64)
    assert (scan.skipped_short, scan.skipped_unsupervised, scan.truncated) == (1, 2, 1)
    assert scan.documents.tolist() == [2, 3]
    assert scan.lengths.tolist() == [20, 12]
    assert scan.seen.nonzero()[0].tolist() == list(range(3, 43))
    with pytest.raises(InputError, match="token id 42"):
        scan_answers(answers, 20, 41)
    with pytest.raises(InputError, match="none of 1 documents"):
        scan_answers(ListedAnswers([example(10, 10)]), 20, 64)


def test_validation_split() -> None:
    scan = scan_answers(listed_answers(50), 64, 64)
    train, held = split_validation(scan, 64, 0)
    assert len(held) == 5
    assert sorted([*train, *held]) == list(range(50))
    assert not np.array_equal(held, split_validation(scan, 64, 1)[1])
