"""The PyTorch form of attention over a paged cache against attention over keys that lie in a row."""

from __future__ import annotations

import pytest
import torch

from peagle.target import paged_attention as module
from peagle.target.paged_attention import PagedBatch, paged_attention, write_kv

HEADS, KV_HEADS, DIM, BLOCK = 6, 2, 16, 4


def one_request(rows: int, context: int, blocks: list[int]) -> PagedBatch:
    positions = torch.arange(context - rows, context)
    tables = torch.tensor([blocks], dtype=torch.int32)
    slots = tables[0, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts, lens = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    return PagedBatch(positions, starts, lens, tables, slots, rows, context)


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None) -> torch.Tensor:
    """Row by row and head by head: q [rows, Hq, D] of the last positions of k and v [context, Hkv, D]."""
    out = torch.empty_like(q)
    for i in range(len(q)):
        last = len(k) - len(q) + i
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(HEADS):
            keys, values = (x[first : last + 1, head // (HEADS // KV_HEADS)] for x in (k, v))
            out[i, head] = (keys @ q[i, head] * DIM**-0.5).softmax(0) @ values
    return out


@pytest.mark.parametrize("blocks", ["in a row", "scattered"])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("rows", "context"), [(1, 1), (1, 30), (4, 4), (4, 33), (70, 70), (70, 90)])
def test_equals_attention_by_hand(rows: int, context: int, window: int | None, blocks: str) -> None:
    g = torch.Generator().manual_seed(rows + context)
    count = -(-context // BLOCK)
    ids = list(range(3, 3 + count)) if blocks == "in a row" else (torch.randperm(count, generator=g) + 2).tolist()
    batch = one_request(rows, context, ids)
    cache = [torch.full((count + 4, BLOCK, KV_HEADS, DIM), float("nan")) for _ in range(2)]
    k, v = (torch.randn(context, KV_HEADS, DIM, generator=g) for _ in range(2))
    write_kv(k, v, cache[0], cache[1], one_request(context, context, ids).slot_mapping)
    q = torch.randn(rows, HEADS + 2, DIM, generator=g)[:, :HEADS]  # a part of a wider product
    for _ in range(2):  # the second time from what the batch keeps
        found = paged_attention(q, cache[0], cache[1], batch, DIM**-0.5, window)
        torch.testing.assert_close(found, by_hand(q, k, v, window), rtol=1e-4, atol=1e-5)


def test_small_work_is_one_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the number of threads is what it was afterwards, after an error too."""
    seen: list[int] = []
    attend = module._attend_one

    def watched(*args: object) -> torch.Tensor:
        seen.append(torch.get_num_threads())
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_attend_one", watched)
    cache = torch.randn(300, BLOCK, KV_HEADS, DIM)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for rows, context in ((2, 9), (200, 1000)):
            batch = one_request(rows, context, list(range(-(-context // BLOCK))))
            paged_attention(torch.randn(rows, HEADS, DIM), cache, cache, batch, 1.0)
            assert torch.get_num_threads() == 2
        assert seen == [1, 2]
        with pytest.raises(RuntimeError):
            paged_attention(torch.randn(2, HEADS, DIM + 1), cache, cache, one_request(2, 2, [0]), 1.0)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_no_rows() -> None:
    batch = one_request(2, 2, [0])
    batch.query_start = torch.zeros(2, dtype=torch.int32)
    cache = torch.zeros(2, BLOCK, KV_HEADS, DIM)
    assert paged_attention(torch.zeros(0, HEADS, DIM), cache, cache, batch, 1.0).shape == (0, HEADS, DIM)


def test_rows_without_a_slot_are_found_once() -> None:
    batch = one_request(3, 3, [0])
    assert batch.all_write
    other = one_request(3, 3, [0])
    other.slot_mapping[1] = -1
    assert not other.all_write
    cache = torch.zeros(2, BLOCK, KV_HEADS, DIM)
    write_kv(torch.ones(3, KV_HEADS, DIM), torch.ones(3, KV_HEADS, DIM), cache, cache, other.slot_mapping)
    assert cache.flatten(0, 1)[:, 0, 0].tolist() == [1, 0, 1, 0, 0, 0, 0, 0]
