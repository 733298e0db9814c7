"""Where an answer among many leaves plain decoding's, in words and as data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.engine.parity import first_divergence, logit_gap
from peagle.target.model import Target


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of an answer that is not plain decoding's.

    prompt and turn count from 0, index counts the answer's tokens from 0. plain_token and other_token are None where
    that answer had ended already. logit_gap: how far apart the two tokens' logits are after the common tokens, None
    when it was not asked for or when one of the tokens is missing. In exact arithmetic no answer differs; a gap of the
    size of the dtype's rounding means that the two tokens were tied.
    """

    prompt: int
    turn: int
    index: int
    plain_token: int | None
    other_token: int | None
    logit_gap: float | None


def difference(
    target: Target | None, prompt: int, turn: int, prompt_ids: Sequence[int], plain: Sequence[int], other: Sequence[int]
) -> Difference | None:
    """Compare two answers to the same prompt; without `target` the logit gap is left out."""
    found = first_divergence(plain, other)
    if found is None:
        return None
    gap = math.inf if target is None else logit_gap(target, prompt_ids, plain, found)
    return Difference(
        prompt, turn, found.index, found.reference_id, found.other_id, gap if math.isfinite(gap) else None
    )


def describe(found: Difference) -> str:
    """A difference as a phrase."""
    where = f"prompt {found.prompt + 1}" + (f", turn {found.turn + 1}" if found.turn else "")
    if found.plain_token is None or found.other_token is None:
        return f"{where}: one of the two answers ends before token {found.index + 1}"
    gap = "" if found.logit_gap is None else f", logit gap there {found.logit_gap:.2g}"
    return f"{where}: token {found.index + 1} differs{gap}"
