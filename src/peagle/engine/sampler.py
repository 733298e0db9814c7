"""Choosing one token from each row of logits: greedy, temperature, min-p, top-k, top-p (vLLM's meaning of each).

The noise of a choice depends only on the request's seed and the position the token will stand at. So a request's tokens
do not depend on the batch it runs in, on preemption, or on whether drafts are verified several at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.engine.argmax import argmax_rows
from peagle.engine.race import noise_bits, race, race_keys, race_rows

# On a CPU sorting a whole vocabulary costs more than the LM head, and top-k and top-p nearly always end within the best
# few tokens. So rows are tried with this many candidates first; what needs more goes on to the next number, then to
# all.
CPU_CANDIDATES = (128, 2048)


@dataclass(slots=True)
class SamplingRows:
    """Rows [n] of the logits that sample, with temperature, top_k (0: off), top_p, seed and the position [n] of the
    token to choose. filtered: all rows have a min-p, top-k or top-p (else none has). min_p [n] (0: off), None when no
    row has one."""

    rows: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor
    positions: Tensor
    filtered: bool
    min_p: Tensor | None = None


def choose(logits: Tensor, sampling: list[SamplingRows]) -> Tensor:
    """Logits [N, V] -> token ids [N]: the argmax, except in the rows of `sampling`."""
    choices = argmax_rows(logits)
    for group in sampling:
        keys = race_keys(group.seed, group.positions)
        if group.filtered:
            scaled = logits[group.rows].float() / group.temperature[:, None]
            chosen = sample_filtered(scaled, group.top_k, group.top_p, keys, group.min_p)
        else:
            chosen = race_rows(logits[group.rows], group.temperature, keys)
        choices[group.rows] = chosen
    return choices


def uniform(seed: Tensor, positions: Tensor) -> Tensor:
    """A number in [0, 1) for each (seed, position), both int64 [n] -> float64 [n]."""
    return ((noise_bits(seed, positions) >> 11) & ((1 << 53) - 1)).double() * 2.0**-53


def sample_filtered(scaled: Tensor, top_k: Tensor, top_p: Tensor, keys: Tensor, min_p: Tensor | None = None) -> Tensor:
    """Sample rows of scaled logits [n, V], keys [n] of `race_keys`, after min-p and top-k, then top-p over what they
    left."""
    norm = scaled.logsumexp(dim=-1)
    chosen = torch.empty(len(scaled), dtype=torch.int64, device=scaled.device)
    rows: Tensor | None = None  # those still to do; None: all
    if not scaled.is_cuda:
        for candidates in CPU_CANDIDATES:
            if candidates >= scaled.shape[1]:
                break
            values, ids = scaled.topk(candidates, dim=-1)
            picked, complete = _sample_sorted(values, ids, top_k, top_p, keys, norm, min_p)
            todo = (~complete).nonzero()[:, 0]
            if rows is None:
                chosen, rows = picked, todo
            else:
                chosen[rows] = picked
                rows = rows[todo]
            if len(todo) == 0:
                return chosen
            scaled, top_k, top_p, keys, norm = scaled[todo], top_k[todo], top_p[todo], keys[todo], norm[todo]
            min_p = None if min_p is None else min_p[todo]
    values, ids = scaled.sort(dim=-1, descending=True, stable=True)
    picked, _ = _sample_sorted(values, ids, top_k, top_p, keys, norm, min_p)
    if rows is None:
        return picked
    chosen[rows] = picked
    return chosen


def _sample_sorted(
    values: Tensor,
    ids: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    keys: Tensor,
    norm: Tensor,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Sample from the best C logits [n, C] in descending order; norm [n] is the logsumexp over the whole vocabulary.

    Returns token ids [n] and whether [n] the candidates hold everything that the filters keep.
    """
    limited = top_k > 0
    # ties with the k-th value are kept, as in vLLM
    kth = values.gather(1, (top_k - 1).clamp(0, values.shape[1] - 1)[:, None])
    kept = (values >= kth) | ~limited[:, None]
    if min_p is not None:  # p >= min_p * max p, in logits; a min-p of 0 keeps everything
        kept = kept & (values >= values[:, :1] + min_p.log()[:, None])
        limited = limited | (min_p > 0)
    norm = torch.where(limited, values.masked_fill(~kept, float("-inf")).logsumexp(dim=-1), norm)
    probs = (values - norm[:, None]).exp() * kept
    before = probs.cumsum(dim=-1) - probs
    within = (before < top_p[:, None]) | (top_p >= 1)[:, None]
    total = before[:, -1] + probs[:, -1]
    complete = torch.where(limited, ~kept[:, -1], (top_p < 1) & (total >= top_p))
    # what underflows to 0 is out, like what is filtered
    index = race(values.masked_fill(~(kept & within) | (probs == 0), float("-inf")), keys, ids)
    return ids.gather(1, index[:, None])[:, 0], complete
