"""The draft batch against a slow version that follows docs/method.md request by request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.kernels.draft_batch import (
    PADDING_SLOT_ID,
    DraftBatch,
    copy_hidden_states,
    expand_draft_batch,
    expand_draft_batch_on_host,
)

MASK = 999


def drop_rejected_rows(batch: DraftBatch) -> DraftBatch:
    """The same batch without its padding; sample_rows of rejected rows point at row 0."""
    kept = (~batch.is_rejected).nonzero()[:, 0]
    before = torch.zeros(len(batch.is_rejected) + 1, dtype=torch.int64, device=kept.device)
    torch.cumsum(~batch.is_rejected, dim=0, out=before[1:])
    sample_rows = torch.where(batch.is_rejected[batch.sample_rows], 0, before[batch.sample_rows])
    return DraftBatch(
        batch.token_ids[kept],
        batch.positions[kept],
        batch.is_rejected[kept],
        batch.is_masked[kept],
        sample_rows,
        batch.hidden_rows[kept],
        batch.slot_mapping[kept],
        before[batch.query_start.long()].int(),
        batch.context_lens,
    )


@dataclass
class Case:
    """A ragged batch: per request rows run, first position, rejected rows, drafts wanted, whether it takes part."""

    rows: list[int]
    first: list[int]
    rejected: list[int]
    wanted: list[int]
    takes_part: list[bool]
    mask_rows: int
    block_size: int
    tokens: Tensor
    following: Tensor
    tables: Tensor


@st.composite
def cases(draw: st.DrawFn) -> Case:
    mask_rows = draw(st.integers(0, 7))
    block_size = draw(st.sampled_from([1, 3, 16]))
    n = draw(st.integers(1, 5))
    rows = draw(st.lists(st.integers(1, 20), min_size=n, max_size=n))
    first = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
    rejected = [draw(st.integers(0, r - 1)) for r in rows]
    wanted = draw(st.lists(st.integers(0, mask_rows + 1), min_size=n, max_size=n))
    takes_part = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    tokens = torch.randint(0, 900, (sum(rows),), generator=generator)
    following = torch.randint(0, 900, (n,), generator=generator)
    blocks = -(-80 // block_size)
    tables = torch.randperm(n * blocks, generator=generator).view(n, blocks).int()
    return Case(rows, first, rejected, wanted, takes_part, mask_rows, block_size, tokens, following, tables)


def run(case: Case, expand: Callable[..., DraftBatch] = expand_draft_batch) -> DraftBatch:
    start = torch.tensor([0, *case.rows]).cumsum(0)
    positions = torch.cat([torch.arange(f, f + r) for f, r in zip(case.first, case.rows, strict=True)])
    return expand(
        case.tokens,
        positions,
        start.int(),
        case.following,
        torch.tensor(case.rejected),
        torch.tensor(case.wanted),
        torch.tensor(case.takes_part),
        case.tables,
        case.block_size,
        case.mask_rows,
        MASK,
    )


# (token, position, kind, target row, slot) of each row; kind is true, mask or rejected
Row = tuple[int, int, str, int, int]
REJECTED: Row = (0, 0, "rejected", 0, PADDING_SLOT_ID)


def expected(case: Case) -> list[list[Row]]:
    requests = []
    start = 0
    for r, rows in enumerate(case.rows):
        out: list[Row] = []
        true = rows - case.rejected[r]
        tokens = [*case.tokens[start : start + true].tolist(), int(case.following[r])]

        def slot(position: int, r: int = r) -> int:
            block = int(case.tables[r, position // case.block_size])
            return block * case.block_size + position % case.block_size

        if case.takes_part[r]:
            for i in range(true):
                position = case.first[r] + i
                out.append((tokens[i + 1], position, "true", start + i, slot(position)))
            for depth in range(1, min(case.wanted[r], case.mask_rows + 1)):
                position = case.first[r] + true - 1 + depth
                out.append((MASK, position, "mask", 0, slot(position)))
        out += [REJECTED] * (rows + case.mask_rows - len(out))
        requests.append(out)
        start += rows
    return requests


def rows_of(batch: DraftBatch) -> list[Row]:
    kinds = [
        "rejected" if r else "mask" if m else "true" for r, m in zip(batch.is_rejected, batch.is_masked, strict=True)
    ]
    columns = (batch.token_ids, batch.positions, batch.hidden_rows, batch.slot_mapping)
    token, position, hidden, slot = (column.tolist() for column in columns)
    return list(zip(token, position, kinds, hidden, slot, strict=True))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_expansion(case: Case) -> None:
    batch = run(case)
    wanted = expected(case)
    starts = batch.query_start.tolist()
    rows = rows_of(batch)
    assert starts == [sum(r + case.mask_rows for r in case.rows[:i]) for i in range(len(case.rows) + 1)]
    assert len(rows) == len(case.tokens) + len(case.rows) * case.mask_rows  # known before verification
    for r, out in enumerate(wanted):
        ours = rows[starts[r] : starts[r + 1]]
        if case.takes_part[r]:
            assert ours == out
            # the rows to sample: the last anchor and the mask rows behind it
            anchor = case.rows[r] - case.rejected[r] - 1
            assert batch.sample_rows[r].tolist() == [starts[r] + anchor + j for j in range(case.mask_rows + 1)]
            assert batch.context_lens[r] == max(row[1] for row in out) + 1
        else:
            assert ours == [REJECTED] * len(out)


@settings(max_examples=100, deadline=None)
@given(cases())
def test_dropping_the_padding(case: Case) -> None:
    whole, batch = run(case), drop_rejected_rows(run(case))
    rows, padded = rows_of(batch), rows_of(whole)
    assert rows == [row for row in padded if row[2] != "rejected"]
    for r in range(len(case.rows)):
        start, end = batch.query_start[r], batch.query_start[r + 1]
        ours = padded[whole.query_start[r] : whole.query_start[r + 1]]
        assert rows[start:end] == [row for row in ours if row[2] != "rejected"]
        for j in range(case.mask_rows + 1):
            old = int(whole.sample_rows[r, j])
            if not whole.is_rejected[old]:
                assert rows[int(batch.sample_rows[r, j])] == padded[old]


@settings(max_examples=100, deadline=None)
@given(cases())
def test_on_the_host(case: Case) -> None:
    """The NumPy form gives the same tensors, types included."""
    expected, ours = drop_rejected_rows(run(case)), run(case, expand_draft_batch_on_host)
    for field in fields(DraftBatch):
        a, b = getattr(ours, field.name), getattr(expected, field.name)
        assert a.dtype == b.dtype, field.name
        assert torch.equal(a, b), field.name


def test_hidden_states() -> None:
    states, shared = torch.randn(4, 3), torch.randn(3)
    hidden = copy_hidden_states(states, shared, torch.tensor([2, 0, 0, 3]), torch.tensor([False, True, False, False]))
    assert torch.equal(hidden, torch.stack((states[2], shared, states[0], states[3])))
    assert torch.equal(copy_hidden_states(states, None, torch.tensor([1]), torch.tensor([False])), states[1:2])
