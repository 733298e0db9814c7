"""The clocks of the race: exponential, each token's own, and nothing else decides."""

from __future__ import annotations

import numpy as np
import torch
from scipy.stats import chisquare

from peagle.engine.race import mix32, mixed_ids, negative_waits, race, race_keys, race_rows

CPU = torch.device("cpu")


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return race_keys(torch.full((count,), seed), torch.arange(count))


def test_waits_are_exponential_and_do_not_go_together() -> None:
    waits = -negative_waits(keys(400), mixed_ids(400, CPU)).double()
    assert waits.min() > 0
    counts = torch.histc((-waits).exp(), 100, 0, 1).numpy()
    assert chisquare(counts).pvalue > 1e-3
    for axis in (0, 1):  # neighbouring positions, neighbouring tokens
        pairs = np.corrcoef(waits.narrow(axis, 0, 399).flatten(), waits.narrow(axis, 1, 399).flatten())
        assert abs(pairs[0, 1]) < 0.015
    other = -negative_waits(keys(400, seed=1), mixed_ids(400, CPU)).double()
    assert abs(np.corrcoef(waits.flatten(), other.flatten())[0, 1]) < 0.015


def test_short_waits_keep_their_digits() -> None:
    """A token of probability 1e-7 wins by them alone."""
    waits = -negative_waits(keys(200), mixed_ids(50_000, CPU))
    short = waits[waits < 1e-5].double()
    assert len(short) > 50
    assert len(short.unique()) > len(short) - 3


def test_mixing_loses_no_number() -> None:
    assert len(mix32(torch.arange(-50_000, 50_000, dtype=torch.int32)).unique()) == 100_000


def test_rows_are_the_race_of_the_whole_vocabulary() -> None:
    logits = torch.randn(300, 5001, generator=torch.Generator().manual_seed(3)) * 3
    temperature = torch.linspace(0.1, 2, 300)
    expected = race(logits / temperature[:, None], keys(300), torch.arange(5001).expand(300, -1))
    assert int((race_rows(logits, temperature, keys(300)) != expected).sum()) <= 1  # the two round differently
    assert race_rows(logits[:0], temperature[:0], keys(0)).shape == (0,)


def test_a_shuffled_order_chooses_the_same_token() -> None:
    logits = torch.randn(50, 200, generator=torch.Generator().manual_seed(4))
    order = torch.randperm(200)
    ids = torch.arange(200).expand(50, -1)
    whole = race(logits, keys(50), ids)
    assert torch.equal(order[race(logits[:, order], keys(50), ids[:, order])], whole)
    assert torch.equal(ids[0], torch.arange(200))


def test_what_cannot_be_never_wins() -> None:
    logits = torch.full((2000, 5), -torch.inf)
    logits[:, 1], logits[:, 3] = 0.0, 1.0
    for chosen in (
        race(logits, keys(2000), torch.arange(5).expand(2000, -1)),
        race_rows(logits, torch.ones(2000), keys(2000)),
    ):
        assert set(chosen.tolist()) == {1, 3}
