"""What changes logits before a token is chosen from them: min_tokens, logit_bias and penalties, as vLLM defines them.

A penalty depends on the tokens before the one to be chosen. Those stand in the token buffer, drafts included: the row
after j drafts is verified as if they were output, and its choice counts only if they turn out to be. So every choice
that counts is the one that plain decoding would make.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Penalties:
    """n rows of the logits. start [n]: where the request's tokens begin in the flat token buffer; length [n]: how many
    stand before the token to choose, of which the first num_prompt [n] are its prompt; longest: the largest length.
    repetition, presence, frequency [n] float32."""

    rows: Tensor
    start: Tensor
    length: Tensor
    num_prompt: Tensor
    longest: int
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


@dataclass(slots=True)
class Adjustments:
    """bans: (rows, token ids) that must not be chosen; bias: (rows, token ids, what to add)."""

    bans: tuple[Tensor, Tensor] | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None
    penalties: Penalties | None = None


def adjust(logits: Tensor, adjustments: Adjustments, flat_tokens: Tensor) -> Tensor:
    """Logits [N, V] with the adjustments made, in place unless they have to become float32 first."""
    if adjustments.bias is not None or adjustments.penalties is not None:
        logits = logits.float()
    if adjustments.bans is not None:
        logits[adjustments.bans] = float("-inf")
    if adjustments.bias is not None:
        rows, ids, values = adjustments.bias
        logits[rows, ids] += values  # a row has a token once
    if adjustments.penalties is not None:
        penalise(logits, adjustments.penalties, flat_tokens)
    return logits


def penalise(logits: Tensor, penalties: Penalties, flat_tokens: Tensor) -> None:
    """Change float32 logits [N, V] in place: repetition first, then frequency, then presence.

    Only the logits of tokens that occur are touched. One that occurs several times is written as often, with the same
    value.
    """
    column = torch.arange(penalties.longest, device=logits.device)
    inside = column < penalties.length[:, None]
    # beyond its length a row repeats its first token
    ids = flat_tokens[penalties.start[:, None] + torch.where(inside, column, 0)].long()
    in_output = inside & (column >= penalties.num_prompt[:, None])
    counts = torch.zeros(len(ids), logits.shape[1], device=logits.device)
    times = counts.scatter_add_(1, ids, in_output.float()).gather(1, ids)
    rows, repetition = penalties.rows[:, None], penalties.repetition[:, None]
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values = values - penalties.frequency[:, None] * times
    logits[rows, ids] = values - penalties.presence[:, None] * (times > 0)
