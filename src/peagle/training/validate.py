"""Validation: loss, top-1 accuracy by depth, and the acceptance length that those first choices would give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.target.model import Target
from peagle.training.attention import Backend
from peagle.training.batches import StepBatch
from peagle.training.chunks import LossRows
from peagle.training.encode import encode_packs
from peagle.training.losses import LossSettings, head_loss
from peagle.training.partition import forward_pack


@dataclass(frozen=True)
class Validation:
    """loss: mean over rows; accuracy[d]: share of depth-d rows whose first choice is the teacher's; acceptance_length:
    1 + sum over d of the share of chains that are right at every depth up to d (teacher-forced, greedy)."""

    loss: float
    accuracy: list[float | None]
    acceptance_length: float


def joint_matches(rows: LossRows, matches: Tensor, depths: int) -> Tensor:
    """[2, K] sums over chains: right at every depth up to d, and reaching depth d. Matches [R] in the rows' order."""
    count = rows.count
    anchor, depth = rows.anchor[:count], rows.depth[:count]
    _, chain = anchor.unique(return_inverse=True)
    grid = torch.zeros(int(chain.max()) + 1 if count else 0, depths, dtype=torch.float64, device=matches.device)
    there = torch.zeros_like(grid)
    grid[chain, depth] = matches[:count].double()
    there[chain, depth] = 1.0
    # a hard loss leaves out rows outside the draft vocabulary: a chain is judged up to its first gap
    there = there.cumprod(1)
    return torch.stack(((grid.cumprod(1) * there).sum(0), there.sum(0)))


@torch.no_grad()
def validate(
    drafter: Drafter,
    target: Target,
    batches: Sequence[StepBatch],
    pack_length: int,
    settings: LossSettings,
    backend: Backend,
) -> Validation:
    """Run validation batches of one pack each, copied to the target's device one at a time, without gradients."""
    stats: Tensor | None = None
    joint: Tensor | None = None
    ids = drafter.config.aux_hidden_state_layer_ids
    for host in batches:
        batch = host.to(target.device)
        (chunks,) = batch.packs
        aux, hidden = encode_packs(target, batch.groups, pack_length, ids, drafter.fc.weight.dtype)
        for chunk, normed in forward_pack(drafter, chunks, aux, backend):
            result = head_loss(
                normed, drafter.lm_head_weight(), chunk.loss, hidden, target.lm_logits, settings, use_teacher=True
            )
            found = joint_matches(chunk.loss, result.matches, settings.depths)
            stats = result.stats if stats is None else stats + result.stats
            joint = found if joint is None else joint + found
    assert stats is not None, "there are validation batches"
    assert joint is not None
    losses, matches, counts = stats.tolist()
    rates = [float(hit) / float(all_) if all_ else 0.0 for hit, all_ in zip(*joint.tolist(), strict=True)]
    return Validation(
        loss=sum(losses) / max(sum(counts), 1.0),
        accuracy=[m / c if c else None for m, c in zip(matches, counts, strict=True)],
        acceptance_length=1.0 + sum(rates),
    )
