"""Which drafts the target agrees with (DESIGN section 4, step 2).

A P-EAGLE or EAGLE-3 draft is one token, not a distribution. Rejection sampling against such a one-hot draft d accepts
it with probability p(d) and otherwise draws from p without d. Drawing t from p and accepting d exactly when t = d is
the same law: t = d has probability p(d), and given t != d, t follows p without d, renormalised. So every verified row
chooses its token first, as plain decoding would, with the noise of its position, and a draft is accepted when it is
that token. Greedy decoding is the special case without noise, and a seeded request gives the same tokens at every K.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accepts(choices: Tensor, drafts: Tensor) -> Tensor:
    """The acceptance rule: the target's own choices and the drafts, both [R, K] -> bool [R, K]."""
    return choices == drafts


def verify(choices: Tensor, drafts: Tensor, num_drafts: Tensor) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafts that the target agrees with, then add its own next token.

    choices [R, K+1]: the target's choice after the last token and after each draft; drafts [R, K], of which the first
    num_drafts [R] count. Returns (tokens [R, K+1], num_accepted [R]): the accepted drafts and, at index num_accepted,
    the target's next token; what stands behind it means nothing.
    """
    depth = torch.arange(drafts.shape[1], device=drafts.device)
    agreed = accepts(choices[:, :-1], drafts) & (depth < num_drafts[:, None])
    num_accepted = agreed.long().cumprod(dim=1).sum(dim=1)
    tokens = choices.clone()
    tokens[:, :-1] = torch.where(depth < num_accepted[:, None], drafts, choices[:, :-1])
    return tokens, num_accepted
