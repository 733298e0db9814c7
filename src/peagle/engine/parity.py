"""Comparing two outputs that should be the same, and judging a difference.

Speculative decoding leaves the output unchanged in exact arithmetic. In floating point a matrix product over K+1 rows
may round differently from one over a single row, so where two tokens are almost equally likely, the greedy choice can
flip. A difference is therefore reported with the gap between the two tokens' logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peagle.target.model import Target


@dataclass(frozen=True)
class Divergence:
    """The first difference: the tokens of the two outputs at `index`; None where an output has ended."""

    index: int
    reference_id: int | None
    other_id: int | None


def first_divergence(reference_ids: Sequence[int], ids: Sequence[int]) -> Divergence | None:
    """Where `ids` first differs from `reference_ids`; None when they are the same."""
    for index in range(max(len(reference_ids), len(ids))):
        ours = ids[index] if index < len(ids) else None
        reference = reference_ids[index] if index < len(reference_ids) else None
        if ours != reference:
            return Divergence(index, reference, ours)
    return None


@torch.inference_mode()
def logit_gap(target: Target, prompt_ids: Sequence[int], reference_ids: Sequence[int], divergence: Divergence) -> float:
    """How far the target's logits of the two tokens are apart after the common prefix, by a dense pass without cache.

    Near 0 the difference is a tie that rounding decided; anything larger is an error. Infinite when one output simply
    ended.
    """
    if divergence.reference_id is None or divergence.other_id is None:
        return float("inf")
    prefix = [*prompt_ids, *reference_ids[: divergence.index]]
    tokens = torch.tensor([prefix], device=target.device)
    logits = target.lm_logits(target.encode(tokens, (0,)).hidden[0, -1]).float()
    return float((logits[divergence.reference_id] - logits[divergence.other_id]).abs())
