"""vLLM's table of draft tokens by batch size: its borders, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.config.speculative import SpeculativeConfig
from peagle.draft_table import drafts_at, parse_draft_table
from peagle.errors import InputError


def config(table: Any, k: int = 3) -> SpeculativeConfig:
    settings = {"model": "head", "num_speculative_tokens": k, "num_speculative_tokens_per_batch_size": table}
    return SpeculativeConfig.parse(settings)


def test_ranges_include_both_ends() -> None:
    table = config([[9, 16, 1], [1, 4, 3], [32, 40, 0]]).num_speculative_tokens_per_batch_size
    assert table == ((1, 4, 3), (9, 16, 1), (32, 40, 0))
    by_size = {1: 3, 4: 3, 9: 1, 16: 1, 32: 0, 40: 0}
    between_and_behind = {5: 3, 8: 3, 17: 1, 31: 1, 41: 0, 10_000: 0}  # those of the range before
    for size, drafts in (by_size | between_and_behind).items():
        assert drafts_at(table, size) == drafts


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ([], "not empty"),
        ({"1": 3}, "expected a list"),
        ("1-4:3", "expected a list"),
        ([[1, 4]], "three whole numbers"),
        ([[1, 4, 2.5]], "three whole numbers"),
        ([[1, 4, True]], "three whole numbers"),
        ([7], "three whole numbers"),
        ([[0, 4, 3]], "batch sizes 0 to 4"),
        ([[4, 1, 3]], "batch sizes 4 to 1"),
        ([[1, 4, -1]], "got -1 draft tokens"),
        ([[1, 4, 4]], r"expected 0 to num_speculative_tokens \(3\)"),
        ([[2, 4, 3]], "begins at batch size 2, expected 1"),
        ([[1, 4, 3], [4, 8, 1]], "1 to 4 and 4 to 8 overlap"),
    ],
)
def test_refused(table: Any, says: str) -> None:
    with pytest.raises(InputError, match="num_speculative_tokens_per_batch_size.*" + says):
        config(table)


def test_a_checked_table_stays() -> None:
    table = parse_draft_table([[1, 1, 3]], 3)
    assert parse_draft_table(table, 3) == table
