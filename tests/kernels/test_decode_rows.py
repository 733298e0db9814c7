"""The bookkeeping kernels of a decoding step against their PyTorch form, and verification against `verify`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from peagle.engine.verification import verify
from peagle.kernels.decode_rows import NUM_DRAFTS, POSITION, lay_out_rows, settle, store_drafts

pytest.importorskip("triton")
from peagle.kernels.decode_rows_triton import lay_out_rows_triton, settle_triton, store_drafts_triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EXAMPLES = 200 if CUDA else 40
WIDTH, BLOCK_SIZE = 50, 4

sizes = (st.integers(1, 6), st.integers(0, 7), st.integers(0, 10_000))


def state(requests: int, k: int, seed: int) -> tuple[Tensor, Tensor, Tensor, torch.Generator]:
    """numbers [7, B] (some requests at or past their end, some padding), the token buffer, block tables."""
    g = torch.Generator().manual_seed(seed)
    numbers = torch.zeros(7, requests, dtype=torch.int64)
    numbers[0] = torch.randint(0, 30, (requests,), generator=g)
    numbers[2] = torch.randint(0, k + 1, (requests,), generator=g)
    end = numbers[0] + torch.randint(0, 12, (requests,), generator=g)
    numbers[3] = torch.where(torch.rand(requests, generator=g) < 0.2, 0, end)
    room = (numbers[3] - numbers[0] - 2).clamp(min=0)
    numbers[1] = torch.minimum(torch.minimum(numbers[2], room), torch.randint(0, k + 1, (requests,), generator=g))
    numbers[5] = torch.randperm(requests + 2, generator=g)[:requests] * WIDTH
    tokens = torch.randint(0, 5, ((requests + 2) * WIDTH,), generator=g).int()
    tables = torch.randperm(requests * 12, generator=g).view(requests, 12).int()
    return numbers, tokens, tables, g


@settings(max_examples=EXAMPLES, deadline=None)
@given(*sizes)
def test_rows(requests: int, k: int, seed: int) -> None:
    numbers, tokens, tables, _ = state(requests, k, seed)
    expected = lay_out_rows(numbers, tokens, tables, BLOCK_SIZE, k)
    ours = lay_out_rows_triton(numbers.to(DEVICE), tokens.to(DEVICE), tables.to(DEVICE), BLOCK_SIZE, k)
    for a, b in zip(ours, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.cpu(), b)


@settings(max_examples=EXAMPLES, deadline=None)
@given(*sizes, st.booleans())
def test_settling(requests: int, k: int, seed: int, synthetic: bool) -> None:
    numbers, tokens, tables, g = state(requests, k, seed)
    token_ids = lay_out_rows(numbers, tokens, tables, BLOCK_SIZE, k)[0].view(requests, k + 1)
    choices = torch.randint(0, 5, (requests, k + 1), generator=g)
    choices[:, :-1] = torch.where(torch.rand(requests, k, generator=g) < 0.7, token_ids[:, 1:], choices[:, :-1])
    accepted = torch.rand(requests, k, generator=g) < 0.7 if synthetic else None
    runs = numbers[POSITION] + 1 < numbers[3]
    wanted, num_accepted = verify(choices, token_ids[:, 1:], torch.where(runs, numbers[NUM_DRAFTS], 0), accepted)

    results = []
    for function, device in ((settle, "cpu"), (settle_triton, DEVICE)):
        moved = [None if x is None else x.clone().to(device) for x in (numbers, choices, token_ids, accepted, tokens)]
        result = torch.zeros(requests, k + 3, dtype=torch.int64, device=device)
        out = function(*moved, WIDTH, result)  # type: ignore[operator]
        buffer = moved[4].view(-1, WIDTH)[:, :-1]  # type: ignore[union-attr]  # the last column holds nothing
        results.append([x.cpu() for x in (*out, moved[0], buffer, result)])  # type: ignore[union-attr]
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    next_token, num_rejected, takes_part, after, _, result = results[0]
    assert torch.equal(num_rejected, k - num_accepted)
    assert torch.equal(result[:, k + 1], num_accepted)
    assert torch.equal(next_token, wanted.gather(1, num_accepted[:, None])[:, 0])
    assert torch.equal(result[:, : k + 1], wanted)
    assert torch.equal(after[POSITION], torch.where(runs, numbers[POSITION] + 1 + num_accepted, numbers[POSITION]))
    assert torch.equal(takes_part, runs & (numbers[2] > 0))
    # a step adds at most the drafts and one token, and never passes the end
    assert (after[NUM_DRAFTS] <= numbers[2]).all()
    assert ((after[POSITION] + after[NUM_DRAFTS] + 2 <= numbers[3]) | (after[NUM_DRAFTS] == 0)).all()


@settings(max_examples=EXAMPLES, deadline=None)
@given(*sizes)
def test_storing_drafts(requests: int, more: int, seed: int) -> None:
    k = more + 1
    numbers, tokens, _, g = state(requests, k, seed)
    drafts = torch.randint(0, 900, (k, requests), generator=g).T  # not contiguous
    settled = (numbers[NUM_DRAFTS], numbers[5], numbers[POSITION])
    expected = tokens.clone()
    store_drafts(expected, WIDTH, drafts, *settled)
    ours = tokens.clone().to(DEVICE)
    store_drafts_triton(ours, drafts.to(DEVICE), *(x.to(DEVICE) for x in settled))
    assert torch.equal(ours.cpu().view(-1, WIDTH)[:, :-1], expected.view(-1, WIDTH)[:, :-1])
