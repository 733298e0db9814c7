"""The tokens that drafts are chosen from on a CPU: the list beside a head, and what texts add to it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from peagle.drafter.draft_vocabulary import (
    FILE,
    RECENT,
    DraftVocabulary,
    frequent_tokens,
    read_draft_vocabulary,
    write_draft_vocabulary,
)
from peagle.errors import InputError

V, H = 1000, 8


def zipf() -> np.ndarray:
    counts = (1e6 / np.arange(1, V + 1) ** 2).astype(np.int64)
    counts[500:] = 0
    return counts[np.random.default_rng(0).permutation(V)]


def make(listed: list[int]) -> DraftVocabulary:
    weight = torch.randn(V, H, generator=torch.Generator().manual_seed(0))
    return DraftVocabulary(torch.tensor(listed), weight, lambda rows: partial(F.linear, weight=rows))


def test_the_most_frequent_are_listed(tmp_path: Path) -> None:
    counts = zipf()
    ids = frequent_tokens(counts)
    assert ids.tolist() == sorted(ids.tolist())
    assert counts[ids].sum() >= 0.99 * counts.sum()
    assert len(ids) % 64 == 0
    assert counts[ids].min() >= np.delete(counts, ids).max()
    assert write_draft_vocabulary(tmp_path, counts) == len(ids)
    found = read_draft_vocabulary(tmp_path, V)
    assert found is not None
    assert found.tolist() == ids.tolist()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_tokens_that_never_occur_are_not_listed() -> None:
    counts = np.zeros(V, dtype=np.int64)
    counts[[3, 700, 5]] = 1, 2, 3
    assert frequent_tokens(counts).tolist() == [3, 5, 700]


def test_no_list(tmp_path: Path) -> None:
    assert read_draft_vocabulary(tmp_path, V) is None
    with pytest.raises(InputError, match="answers: hold no token"):
        write_draft_vocabulary(tmp_path, np.zeros(V, dtype=np.int64))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": "no base64!"}, "cannot be read"),
        ({"bits": 7}, "cannot be read"),
        ({"bits": None}, "cannot be read"),
        ({"vocab_size": V + 1}, f"vocab_size: got {V + 1} .*, expected the target's {V}"),
        ({"listed": 1}, "bits: .*, expected 1, each below"),
        ({"bits": "AAAA", "listed": 0}, "bits: .* lists 0 tokens"),
        ({"bits": "/////" * 80, "listed": 30 * 80}, f"each below {V}"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_draft_vocabulary(tmp_path, zipf())
    path = tmp_path / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputError, match=message):
        read_draft_vocabulary(tmp_path, V)


def test_a_damaged_list_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("{")
    with pytest.raises(InputError, match=f"{FILE} cannot be read"):
        read_draft_vocabulary(tmp_path, V)


def test_logits_are_those_of_the_ids() -> None:
    vocabulary = make([1, 7, 50])
    rows = torch.randn(4, H)
    for seen in ([], [900, 3, 900], [7, 3, 901]):
        vocabulary.see(np.array(seen, dtype=np.int64))
        assert len(set(vocabulary.ids.tolist())) == len(vocabulary.ids) == 3 + RECENT
        assert set(seen) <= set(vocabulary.ids.tolist())
        assert vocabulary.ids[:3].tolist() == [1, 7, 50]
        torch.testing.assert_close(vocabulary.logits(rows), rows @ vocabulary.weight[vocabulary.ids].T)


def test_the_oldest_give_way() -> None:
    vocabulary = make([0])
    for first in range(1, 900, 10):
        vocabulary.see(np.arange(first, first + 10))
    recent = sorted(vocabulary.recent.tolist())
    assert recent == list(range(901 - RECENT, 901))
    unknown = [i for i in range(V) if i not in set(vocabulary.ids.tolist())]
    vocabulary.see(np.arange(V))  # more than there is room for: the latest
    assert sorted(vocabulary.recent.tolist()) == unknown[-RECENT:]


def test_a_small_vocabulary_is_taken_in_whole() -> None:
    vocabulary = make(list(range(V - 5)))
    vocabulary.see(np.arange(V))
    assert sorted(vocabulary.ids.tolist()) == list(range(V))
