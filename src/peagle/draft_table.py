"""vLLM's `num_speculative_tokens_per_batch_size`: how many draft tokens a request gets, by how many requests run."""

from __future__ import annotations

from itertools import pairwise

from peagle.errors import InputError

NAME = "num_speculative_tokens_per_batch_size"
# (first batch size, last batch size, draft tokens a request), ascending
DraftTable = tuple[tuple[int, int, int], ...]


def parse_draft_table(value: object, num_speculative_tokens: int) -> DraftTable:
    """Check a table and sort it by batch size, by vLLM's rules: ranges include both ends, begin at 1 and do not
    overlap; 0 draft tokens decode plainly. Unlike there, more than num_speculative_tokens is refused and not cut.

    Raises InputError.
    """
    if not isinstance(value, list | tuple) or not value:
        raise InputError(
            f"{NAME}: got {value!r}, expected a list of (first batch size, last batch size, draft tokens), not empty"
        )
    rows: list[tuple[int, int, int]] = []
    for entry in value:
        whole = isinstance(entry, list | tuple) and all(isinstance(n, int) and not isinstance(n, bool) for n in entry)
        if not whole or len(entry) != 3:
            raise InputError(
                f"{NAME}: got {entry!r}, expected three whole numbers (first batch size, last batch size, draft tokens)"
            )
        first, last, drafts = entry
        if not 1 <= first <= last:
            raise InputError(f"{NAME}: got batch sizes {first} to {last}, expected 1 or more, and the last not less")
        if not 0 <= drafts <= num_speculative_tokens:
            raise InputError(
                f"{NAME}: got {drafts} draft tokens for batch sizes {first} to {last}, expected 0 to "
                f"num_speculative_tokens ({num_speculative_tokens})"
            )
        rows.append((first, last, drafts))
    rows.sort()
    if rows[0][0] != 1:
        raise InputError(f"{NAME}: begins at batch size {rows[0][0]}, expected 1, so that every batch size is covered")
    for before, after in pairwise(rows):
        if after[0] <= before[1]:
            raise InputError(
                f"{NAME}: batch sizes {before[0]} to {before[1]} and {after[0]} to {after[1]} overlap, expected each "
                "batch size once"
            )
    return tuple(rows)


def drafts_at(table: DraftTable, batch_size: int) -> int:
    """Draft tokens at a batch size. One between two ranges, or behind the last, has those of the range before it."""
    return [drafts for first, _, drafts in table if first <= batch_size][-1]
