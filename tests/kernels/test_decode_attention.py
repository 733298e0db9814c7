"""Attention of one tile a request against the PyTorch form, in every form that a configuration can ask for."""

from dataclasses import replace

import pytest
import torch

from peagle.kernels import attention_table
from peagle.kernels.attention_table import DecodeConfig, choose_config, tile_rows, useful_splits
from peagle.target.paged_attention import PagedBatch, paged_attention

pytest.importorskip("triton")
from peagle.kernels.decode_attention import decode_attention_triton
from peagle.kernels.paged_attention import paged_attention_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = DecodeConfig(16, 4, 3)
SPLIT = DecodeConfig(16, 2, 2, num_splits=4)
KEYS = DecodeConfig(64, 4, 2, keys_first=True)
SPLIT_KEYS = DecodeConfig(64, 4, 2, num_splits=2, keys_first=True)


def ragged(seed, heads=(6, 2), dim=32, block_size=16, query_lens=(1, 8, 0, 3), histories=(0, 140, 3, 17)):
    """q, caches and a batch with a request without rows; behind a context its table names a block of NaN."""
    g = torch.Generator().manual_seed(seed)
    contexts = [h + q for h, q in zip(histories, query_lens, strict=True)]
    width = max(-(-c // block_size) for c in contexts)
    tables = torch.randperm(width * len(contexts), generator=g).view(len(contexts), width).int()
    for table, context in zip(tables, contexts, strict=True):
        table[-(-context // block_size) :] = tables.numel()
    positions = torch.cat([torch.arange(h, c) for h, c in zip(histories, contexts, strict=True)])
    start, lens = torch.tensor([0, *query_lens]).cumsum(0).int(), torch.tensor(contexts).int()
    tensors = [x.to(DEVICE) for x in (positions, start, lens, tables, torch.zeros_like(positions))]
    batch = PagedBatch(*tensors, max(query_lens), max(contexts))
    q, cache = torch.randn(len(positions), heads[0], dim, generator=g), []
    for _ in range(2):
        cache.append(torch.randn(tables.numel() + 1, block_size, heads[1], dim, generator=g))
        cache[-1][-1] = float("nan")
    return *(x.to(DEVICE) for x in (q, *cache)), batch


@pytest.mark.parametrize(
    ("config", "heads", "dim", "options"),
    [
        (ROWS, (6, 2), 32, {}),
        (ROWS, (4, 4), 24, {"softcap": 5.0}),
        (ROWS, (6, 2), 32, {"sliding_window": 20}),
        (SPLIT, (9, 3), 16, {}),
        (SPLIT, (6, 2), 32, {"sinks": True, "sliding_window": 40, "softcap": 3.0}),
        (KEYS, (6, 2), 32, {}),
        (KEYS, (4, 4), 24, {"sinks": True, "sliding_window": 16}),
        (SPLIT_KEYS, (8, 1), 16, {"sinks": True, "softcap": 3.0}),
    ],
)
def test_equals_pytorch(config, heads, dim, options):
    q, k, v, batch = ragged(0, heads, dim)
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(heads[0], device=DEVICE)}
    expected = paged_attention(q, k, v, batch, dim**-0.5, **options)
    got = decode_attention_triton(q, k, v, batch, dim**-0.5, config, **options)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [ROWS, SPLIT_KEYS])
def test_equal_rows(config):
    q, k, v, batch = ragged(5, query_lens=(3, 3, 3), histories=(0, 90, 17))
    expected = paged_attention(q, k, v, batch, 0.2)
    torch.testing.assert_close(decode_attention_triton(q, k, v, batch, 0.2, config), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", [ROWS, SPLIT, SPLIT_KEYS])
def test_random_lengths(config, seed):
    g = torch.Generator().manual_seed(seed)
    queries = torch.randint(0, 9, (4,), generator=g).tolist()
    histories = torch.randint(1, 150, (4,), generator=g).tolist()
    q, k, v, batch = ragged(seed, (4, 2), 16, 8, queries, histories)
    q = torch.cat((q, q), 1)[:, : q.shape[1]]  # rows with a stride of their own, as slices of a joint projection have
    expected = paged_attention(q, k, v, batch, 0.25)
    got = decode_attention_triton(q, k, v, batch, 0.25, config)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("config", [ROWS, SPLIT, KEYS, SPLIT_KEYS])
@pytest.mark.parametrize("early_join", [False, True])
def test_bfloat16_in_a_graph(config, early_join):
    """What the matrix units compute, replayed over other queries and lengths than it was recorded with."""
    q, k, v, batch = ragged(4, (8, 2), 64)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    config = replace(config, early_join=early_join)
    decode_attention_triton(q, k, v, batch, 0.125, config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention_triton(q, k, v, batch, 0.125, config)
    for shorter in (0, 50):
        q.normal_()
        batch.context_lens[1] -= shorter
        batch.positions[1:9] -= shorter
        out.fill_(float("nan"))
        graph.replay()
        batch.views = None
        expected = paged_attention(q.float(), k, v, batch, 0.125)
        assert (out.float() - expected).norm() < 1e-2 * expected.norm()


def test_table(monkeypatch):
    """The first entry that holds a batch is taken, and what is not listed is left to the general kernel."""
    small, large = DecodeConfig(32, 2, 3, 8), DecodeConfig(64, 4, 2)
    monkeypatch.setattr(attention_table, "TABLE", {(32, 32): ((16, small), (64, large))})
    assert choose_config(8, 8, 2, 3, 32, 2) is small
    assert choose_config(9, 8, 2, 3, 32, 2) is large
    assert choose_config(33, 8, 2, 3, 32, 2) is None
    assert choose_config(8, 5, 2, 3, 32, 2) is None  # 15 rows: a tile of 16
    assert choose_config(8, 8, 2, 3, 64, 2) is None
    assert choose_config(8, 8, 2, 3, 32, 1) is None


def test_tiles_and_splits():
    assert [tile_rows(rows, 4) for rows in (1, 4, 5, 8, 14, 17)] == [16, 16, 32, 32, 64, 128]
    assert tile_rows(5, 3) == 16
    config = DecodeConfig(64, 4, 2, 16)
    assert [useful_splits(config, n) for n in (1, 64, 65, 200, 512, 1024, 9000)] == [1, 1, 2, 4, 8, 16, 16]


def test_listed_batches_run_it(monkeypatch):
    q, k, v, batch = ragged(3)
    q, k, v = q.half(), k.half(), v.half()
    general = paged_attention_triton(q, k, v, batch, 0.2)
    seen = []

    def chosen(*facts):
        seen.append(facts)
        return SPLIT

    monkeypatch.setattr("peagle.kernels.paged_attention.choose_config", chosen)
    torch.testing.assert_close(paged_attention_triton(q, k, v, batch, 0.2), general, rtol=5e-3, atol=5e-3)
    assert seen == [(4, 8, 2, 3, 32, 2)]


def test_a_single_requests_rows_share_a_form():
    """Rows of 64-wide heads are summed alike whether a request verifies one row or as many as a tile of 32 holds."""
    assert choose_config(1, 1, 3, 3, 64, 2) == choose_config(1, 10, 3, 3, 64, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("context", [17, 130, 700, 2000])
def test_a_row_is_the_same_alone_and_among_drafts(context):
    """Bit for bit in bfloat16: how keys lie over warps decides in which order they are added up."""
    q, k, v, batch = ragged(5, (9, 3), 64, query_lens=(10,), histories=(context,))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    whole = decode_attention_triton(q, k, v, batch, 0.125, choose_config(1, 10, 3, 3, 64, 2))
    for row in (0, 4, 9):
        start = torch.tensor([0, 1], device=DEVICE, dtype=torch.int32)
        length = torch.tensor([context + row + 1], device=DEVICE, dtype=torch.int32)
        slots = batch.slot_mapping[row : row + 1]
        one = PagedBatch(batch.positions[row : row + 1], start, length, batch.block_tables, slots, 1, context + row + 1)
        alone = decode_attention_triton(q[row : row + 1], k, v, one, 0.125, choose_config(1, 1, 3, 3, 64, 2))
        assert torch.equal(alone[0], whole[row])
