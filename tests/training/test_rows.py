"""Which rows are trained, and what each of them reads and predicts."""

from __future__ import annotations

import torch

from peagle.training.rows import build_rows, document_starts, sample_depths, supervised_depths

from .helpers import VOCAB, table_of, tiny_pack


def test_rows_are_those_of_the_design() -> None:
    pack = tiny_pack()
    table = table_of(pack, "p-eagle", 5, keep_rate=0.8)
    n = table.num_anchors
    assert torch.equal(table.anchor[:n], torch.arange(n))
    assert not table.depth[:n].any()
    starts = document_starts(pack.doc_ids)
    chains = {}
    for row in range(len(table.anchor)):
        p, j = int(table.anchor[row]), int(table.depth[row])
        assert int(table.position[row]) == p - int(starts[p]) + j
        if row >= n:
            assert int(table.token[row]) == VOCAB - 1, "MTP rows read the mask token"
            assert table.supervised[row]
            chains.setdefault(p, []).append(j)
        elif table.supervised[row]:
            assert int(table.token[row]) == int(pack.tokens[p + 1])
        if table.supervised[row]:
            assert int(table.predicted[row]) == p + j + 2
            assert int(table.teacher[row]) == p + j + 1
            assert pack.answers[p + j + 2]
            assert pack.doc_ids[p + j + 2] == pack.doc_ids[p]
    for p, depths in chains.items():
        assert depths == list(range(1, len(depths) + 1)), "a chain has no hole"
        assert table.supervised[p], "a chain starts at a supervised row"
    lengths = table.chain_offsets.diff()
    assert all(int(lengths[p]) == len(chains.get(p, [])) for p in range(n))


def test_supervision_stops_at_documents_and_user_turns() -> None:
    doc_ids = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, -1])
    answers = torch.tensor([0, 0, 1, 1, 1, 0, 1, 0, 1, 0], dtype=torch.bool)
    expected = torch.tensor(
        [
            [1, 1, 1],  # predicts 2, 3, 4
            [1, 1, 0],
            [1, 0, 0],  # 5 belongs to the next document
            [0, 0, 0],
            [0, 0, 0],
            [0, 0, 0],  # predicts 7, the user's
            [1, 0, 0],
            [0, 0, 0],
            [0, 0, 0],
            [0, 0, 0],
        ],
        dtype=torch.bool,
    )
    assert torch.equal(supervised_depths(doc_ids, answers, 3), expected)


def test_every_supervised_depth_is_kept_at_rate_one_and_none_at_zero() -> None:
    pack = tiny_pack()
    supervised = supervised_depths(pack.doc_ids, pack.answers, 6)
    everything = sample_depths(supervised, 1.0, torch.Generator())
    assert torch.equal(everything, (supervised.sum(1) - 1).clamp(min=0))
    assert not sample_depths(supervised, 0.0, torch.Generator()).any()


def test_conditional_drop_keeps_depth_d_at_rate_to_the_d() -> None:
    n, k, rate = 20000, 6, 0.8
    chain = sample_depths(torch.ones(n, k, dtype=torch.bool), rate, torch.Generator().manual_seed(1))
    for d in range(1, k):
        share = float((chain >= d).float().mean())
        assert abs(share - rate**d) < 4 * (rate**d * (1 - rate**d) / n) ** 0.5


def test_equal_seeds_give_equal_rows() -> None:
    pack = tiny_pack()
    a, b, c = (table_of(pack, "p-eagle", seed=s) for s in (3, 3, 4))
    assert torch.equal(a.anchor, b.anchor)
    assert not torch.equal(a.chain_offsets, c.chain_offsets)


def test_eagle3_rows_read_true_tokens() -> None:
    pack = tiny_pack()
    table = build_rows(pack.tokens, pack.doc_ids, pack.answers, 7, 1.0, torch.Generator(), None)
    rows = table.supervised
    assert torch.equal(table.token[rows], pack.tokens[(table.anchor + table.depth + 1)[rows]])


def test_pack_without_answers_has_no_chains() -> None:
    pack = tiny_pack()
    table = build_rows(pack.tokens, pack.doc_ids, torch.zeros_like(pack.answers), 4, 1.0, torch.Generator(), 0)
    assert len(table.anchor) == table.num_anchors
    assert not table.supervised.any()
