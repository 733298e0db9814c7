"""Rows and weights of a step."""

from __future__ import annotations

import numpy as np
import pytest

from peagle.training.batches import BatchMaker

from .helpers import ListedAnswers, listed_answers


def maker(answers: ListedAnswers, **over: object) -> BatchMaker:
    settings: dict[str, object] = {
        "answers": answers,
        "pack_length": 64,
        "chunk_size": 64,
        "depths": 4,
        "keep_rate": 0.8,
        "mask_token_id": 63,
        "stepwise": False,
        "hard": False,
        "depth_weights": None,
        "draft_ids": None,
        "row_multiple": 1,
        "slice_rows": 64,
        "loss_multiple": 1,
        "seed": 0,
        "encode_tokens": 256,
        "encode_overhead": 16,
    }
    return BatchMaker(**(settings | over))  # type: ignore[arg-type]


def test_weights_of_a_step_sum_to_one() -> None:
    answers = listed_answers(20)
    batch = maker(answers).make(0, [[0, 1], [2], [3, 4]], 1)
    assert sum(float(c.loss.weight.sum()) for p in batch.packs for c in p) == pytest.approx(1.0)
    assert batch.documents == 5
    assert batch.tokens == sum(len(answers[i].input_ids) for i in range(5))


def test_chunks_hold_the_rows_of_the_whole() -> None:
    answers = listed_answers(20)
    (whole,) = maker(answers).make(3, [[0, 1]], 1).packs[0]
    parts = maker(answers, chunk_size=10).make(3, [[0, 1]], 1).packs[0]
    fields = {
        "teacher": lambda rows: rows.positions[rows.teacher],
        "token": lambda rows: rows.token,
        "depth": lambda rows: rows.depth,
    }
    for field in fields.values():
        key = lambda rows, of=field: sorted(zip(of(rows).tolist(), rows.anchor.tolist(), strict=True))  # noqa: E731
        assert sorted(x for part in parts for x in key(part.loss)) == key(whole.loss)
    assert len(whole.loss.positions) < whole.loss.count / 2, "rows share teachers"


def test_a_process_opens_its_own_documents_alone() -> None:
    answers = listed_answers(20)
    lengths = np.array([min(len(answers[i].input_ids), 64) for i in range(20)])
    packs = [[document] for document in range(7)]
    opened: list[int] = []

    class Noted(ListedAnswers):
        def __getitem__(self, document: int) -> object:
            opened.append(document)
            return answers[document]

    whole = maker(answers).make(3, packs, stream=0)
    shares = [
        maker(Noted(answers.examples), lengths=lengths, rank=rank, world=2).make(3, packs, stream=0) for rank in (0, 1)
    ]
    assert sorted(opened) == list(range(7))
    assert [share.tokens for share in shares] == [whole.tokens] * 2
    assert sum(share.rows for share in shares) == whole.rows
