"""Packing, schedules and the target's states in their places."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from peagle.errors import InputError
from peagle.training.batches import BatchMaker, Schedule, pack_documents, prefetch, scan_answers, split_validation
from peagle.training.encode import encode_packs

from .helpers import ListedAnswers, ListedExample, listed_answers, tiny_target


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


def test_packs_hold_every_document_once_and_fit() -> None:
    lengths = np.random.default_rng(0).integers(2, 65, 3000)
    packs = pack_documents(lengths, 64, (0, 0))
    assert sorted(i for pack in packs for i in pack) == list(range(3000))
    assert max(lengths[pack].sum() for pack in packs) <= 64
    assert lengths.sum() / (64 * len(packs)) > 0.95
    assert packs == pack_documents(lengths, 64, (0, 0))
    assert packs != pack_documents(lengths, 64, (0, 1))


def test_schedule_counts_steps() -> None:
    lengths = np.full(10, 30)
    schedule = Schedule(np.arange(10), lengths, 64, 2, 0)
    assert len(schedule.epoch(0)) == 3
    assert schedule.steps_for(None, 2, None) == 6
    assert schedule.steps_for(None, None, 15) == 5  # 4 + 4 + 2, then 4 + 4
    assert schedule.steps_for(None, 1, 100) == 3
    assert schedule.steps_for(7, 10**9, None) == 7
    assert schedule.steps_for(7, 1, None) == 3
    assert schedule.steps_for(7, None, None) == 7
    assert schedule.steps_for(None, None, None) is None
    assert schedule.locate(7) == (2, 1)


def test_validation_split() -> None:
    scan = scan_answers(listed_answers(50), 64, 64)
    train, held = split_validation(scan, 64, 0)
    assert len(held) == 5
    assert sorted([*train, *held]) == list(range(50))
    assert not np.array_equal(held, split_validation(scan, 64, 1)[1])


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


@pytest.mark.parametrize("overhead", [0, 16, 10**6])
def test_states_lie_where_their_tokens_lie(overhead: int) -> None:
    answers, target = listed_answers(12), tiny_target()
    packs = [[0, 1], [2], [3, 4]]
    batch = maker(answers, encode_overhead=overhead).make(0, packs, 1)
    aux, hidden = encode_packs(target, batch.groups, 3 * 64, (1, 2, 3), torch.float32)
    for number, pack in enumerate(packs):
        at = number * 64
        groups = [g.within(number * 64, (number + 1) * 64) for g in batch.groups]
        one, _ = encode_packs(target, [g for g in groups if g is not None], 64, (1, 2, 3), torch.float32)
        assert torch.allclose(one, aux[number * 64 : (number + 1) * 64], atol=1e-5)
        for document in pack:
            ids = torch.from_numpy(answers[document].input_ids.astype(np.int64))[None]
            alone = target.encode(ids, (1, 2, 3))
            span = slice(at, at + ids.shape[1])
            assert torch.allclose(aux[span], alone.aux[0], atol=1e-5)
            assert torch.allclose(hidden[span], alone.hidden[0], atol=1e-5)
            at += ids.shape[1]


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
