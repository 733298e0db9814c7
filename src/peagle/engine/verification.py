"""Which drafts the target agrees with (docs/method.md, "One decoding step").

A P-EAGLE or EAGLE-3 draft is one token, not a distribution. Rejection sampling against such a one-hot draft d accepts
it with probability p(d) and otherwise draws from p without d. Drawing t from p and accepting d exactly when t = d is
the same law: t = d has probability p(d), and given t != d, t follows p without d, renormalised. So every verified row
chooses its token first, as plain decoding would, with the noise of its position, and a draft is accepted when it is
that token. Greedy decoding is the special case without noise, and a seeded request gives the same tokens at every K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.engine.sampler import uniform

SYNTHETIC = 0x5EED  # sets the noise of synthetic acceptance apart from that of sampling


def accepts(choices: Tensor, drafts: Tensor) -> Tensor:
    """The acceptance rule: the target's own choices and the drafts, both [R, K] -> bool [R, K]."""
    return choices == drafts


def conditional_rates(rates: tuple[float, ...], device: torch.device) -> Tensor:
    """How often each position and all before it are accepted -> how often it is once those before it were, [K]."""
    before = (1.0, *rates)
    return torch.tensor(
        [now / last if last > 0 else 0.0 for now, last in zip(rates, before, strict=False)],
        dtype=torch.float64,
        device=device,
    )


def accepts_anything(rates: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Synthetic acceptance, for benchmarks only: by chance at conditional rates [K], whatever the drafts are.

    seed [R], positions [R] of the last tokens before the drafts -> bool [R, K], the same whatever runs in the batch.
    """
    if seed.is_cuda:
        from peagle.kernels.accept_by_chance import accept_by_chance_triton

        return accept_by_chance_triton(rates, seed.contiguous(), positions.contiguous(), SYNTHETIC)
    depth = torch.arange(1, len(rates) + 1, device=rates.device)
    return uniform((seed ^ SYNTHETIC)[:, None], positions[:, None] + depth) < rates


def verify(
    choices: Tensor, drafts: Tensor, num_drafts: Tensor, accepted: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accept the longest prefix of drafts that the target agrees with, then add its own next token.

    choices [R, K+1]: the target's choice after the last token and after each draft; drafts [R, K], of which the first
    num_drafts [R] count. Returns (tokens [R, K+1], num_accepted [R]): the accepted drafts and, at index num_accepted,
    the target's next token; what stands behind it means nothing. accepted [R, K]: synthetic acceptance in place of the
    rule.
    """
    depth = torch.arange(drafts.shape[1], device=drafts.device)
    agreed = (accepts(choices[:, :-1], drafts) if accepted is None else accepted) & (depth < num_drafts[:, None])
    num_accepted = agreed.long().cumprod(dim=1).sum(dim=1)
    tokens = choices.clone()
    tokens[:, :-1] = torch.where(depth < num_accepted[:, None], drafts, choices[:, :-1])
    return tokens, num_accepted
