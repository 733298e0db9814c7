"""The Triton kernels against their PyTorch form, on random ragged batches."""

import pytest
import torch

from peagle.target.paged_attention import PagedBatch, paged_attention, write_kv

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")
from peagle.kernels.paged_attention import choose_splits, paged_attention_triton, write_kv_triton  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"


def ragged(seed, heads=(6, 2), dim=32, block_size=16, query_lens=(1, 8, 3, 20), histories=(0, 40, 17, 5)):
    """Caches and a batch in which every request has some history and some new rows."""
    g = torch.Generator().manual_seed(seed)
    contexts = [h + q for h, q in zip(histories, query_lens, strict=True)]
    width = max(-(-c // block_size) for c in contexts)
    tables = torch.randperm(width * len(contexts), generator=g).view(len(contexts), width).int()
    positions = torch.cat([torch.arange(h, c) for h, c in zip(histories, contexts, strict=True)])
    start = torch.tensor([0, *query_lens]).cumsum(0).int()
    context_lens, slots = torch.tensor(contexts).int(), torch.zeros_like(positions)
    batch = PagedBatch(positions, start, context_lens, tables, slots, max(query_lens), max(contexts))
    pool = (tables.numel(), block_size, heads[1], dim)
    q = torch.randn(len(positions), heads[0], dim, generator=g)
    return q, torch.randn(pool, generator=g), torch.randn(pool, generator=g), batch


def to_device(batch):
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in vars(batch).items()}
    return PagedBatch(**moved)


@pytest.mark.parametrize(
    ("heads", "dim", "options"),
    [
        ((6, 2), 32, {}),
        ((9, 3), 64, {}),
        ((4, 4), 24, {}),
        ((6, 2), 32, {"sliding_window": 7}),
        ((8, 1), 16, {"softcap": 5.0}),
        ((6, 2), 32, {"sinks": True, "sliding_window": 16}),
    ],
)
def test_attention_equals_pytorch(heads, dim, options):
    q, k, v, batch = ragged(0, heads, dim)
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(heads[0])}
    expected = paged_attention(q, k, v, batch, dim**-0.5, **options)
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    got = paged_attention_triton(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), to_device(batch), dim**-0.5, **moved)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_attention_on_random_lengths(seed):
    g = torch.Generator().manual_seed(seed)
    queries = torch.randint(1, 12, (5,), generator=g).tolist()
    histories = torch.randint(0, 70, (5,), generator=g).tolist()
    q, k, v, batch = ragged(seed, (4, 2), 16, 8, queries, histories)
    expected = paged_attention(q, k, v, batch, 0.25)
    got = paged_attention_triton(q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), to_device(batch), 0.25)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("splits", "options"), [(2, {}), (16, {"sinks": True, "sliding_window": 40, "softcap": 3.0})])
def test_split_keys(splits, options):
    q, k, v, batch = ragged(2, (4, 2), 32, 16, (1, 8, 3), (0, 200, 64))
    if options.get("sinks"):
        options = {**options, "sinks": torch.randn(4)}
    expected = paged_attention(q, k, v, batch, 32**-0.5, **options)
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    on_device = (q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), to_device(batch))
    got = paged_attention_triton(*on_device, 32**-0.5, **moved, num_splits=splits)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_splits_fill_the_card():
    assert choose_splits(1, 8, 8, 8, 4096, 264) == 16
    assert choose_splits(8, 8, 8, 8, 4096, 264) == 8
    assert choose_splits(64, 8, 8, 8, 4096, 264) == 1
    assert choose_splits(1, 8, 8, 8, 100, 264) == 2
    assert choose_splits(1, 2048, 8, 8, 4096, 264) == 1


def test_float8_cache():
    """Writing and reading float8, with numbers beyond what it holds."""
    q, k, v, batch = ragged(1, query_lens=(1, 8, 3, 20))
    new_k, new_v = torch.randn(32, 2, 32), torch.randn(32, 2, 32) * 3
    if not CUDA:  # Triton's interpreter rounds to float8 wrongly, so let there be nothing to round
        new_k, new_v = (x.to(torch.float8_e4m3fn).float() for x in (new_k, new_v))
    new_k[0, 0, 0], new_v[1, 0, 0] = 1e4, -1e4
    batch.slot_mapping[:] = torch.randperm(k.shape[0] * k.shape[1])[:32]
    batch.slot_mapping[5] = -1
    caches = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    moved = [x.clone().to(DEVICE) for x in caches]
    write_kv(new_k, new_v, *caches, batch.slot_mapping)
    flat = [x.view(-1, 2, 32) for x in moved]
    write_kv_triton(new_k.to(DEVICE), new_v.to(DEVICE), *flat, batch.slot_mapping.to(DEVICE))
    for ours, expected in zip(moved, caches, strict=True):
        assert torch.equal(ours.cpu().view(torch.uint8), expected.view(torch.uint8))
        assert expected.float().abs().max() == 448
    expected = paged_attention(q, *caches, batch, 32**-0.5)
    got = paged_attention_triton(q.to(DEVICE), *moved, to_device(batch), 32**-0.5)
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_write_skips_padding_slots():
    k, v = torch.randn(5, 2, 24), torch.randn(5, 2, 24)
    slots = torch.tensor([3, -1, 7, -1, 0])
    expected = [torch.zeros(4, 2, 2, 24) for _ in range(2)]
    write_kv(k, v, *expected, slots)
    caches = [torch.zeros(8, 2, 24, device=DEVICE) for _ in range(2)]
    write_kv_triton(k.to(DEVICE), v.to(DEVICE), *caches, slots.to(DEVICE))
    for got, want in zip(caches, expected, strict=True):
        assert torch.equal(got.cpu(), want.flatten(0, 1))
    assert (expected[0].flatten(0, 1)[[1, 2, 4, 5, 6]] == 0).all()
