"""Validation: loss, top-1 accuracy by depth, and the acceptance length that those first choices would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.target.model import Target
from peagle.training.attention import Backend
from peagle.training.batches import StepBatch
from peagle.training.chunks import LossRows
from peagle.training.distributed import World
from peagle.training.losses import LossSettings, head_loss
from peagle.training.partition import forward_pack


@dataclass(frozen=True)
class Validation:
    """loss: mean over rows; accuracy[d]: share of depth-d rows whose first choice is the teacher's; acceptance_length:
    1 + sum over d of the share of chains that are right at every depth up to d (teacher-forced, greedy);
    without_loops: the same over chains whose first token is not part of exactly repeating text, of which there are
    `loop_share` (small models end many answers in loops, where any drafter is right). joint[d], without_loops too: the
    terms of that sum, so that 1 + sum(joint[:K]) compares heads trained to different depths."""

    loss: float
    accuracy: list[float | None]
    acceptance_length: float
    without_loops: float
    loop_share: float
    joint: tuple[float, ...] = ()

    def log_values(self, step: int) -> dict[str, Any]:
        """The line of metrics.jsonl."""
        return {
            "step": step,
            "validation_loss": self.loss,
            "validation_accuracy": self.accuracy,
            "validation_acceptance_length": self.acceptance_length,
            "validation_acceptance_length_without_loops": self.without_loops,
            "validation_loop_share": self.loop_share,
            "validation_joint_without_loops": list(self.joint),
        }

    def summary(self, step: int) -> str:
        shown = " ".join("-" if a is None else f"{a:.3f}" for a in self.accuracy)
        return (
            f"step {step}: validation loss {self.loss:.4f}, acceptance length {self.acceptance_length:.3f} "
            f"({self.without_loops:.3f} without the {self.loop_share:.0%} in repeating text), top-1 by depth {shown}"
        )


def joint_matches(rows: LossRows, matches: Tensor, depths: int, left_out: Tensor | None = None) -> Tensor:
    """[2, K] sums over chains: right at every depth up to d, and reaching depth d. Matches [R] in the rows' order.

    left_out [R] bool: rows (those of whole chains) that are not counted.
    """
    count = rows.count
    anchor, depth = rows.anchor[:count], rows.depth[:count]
    _, chain = anchor.unique(return_inverse=True)
    grid = torch.zeros(int(chain.max()) + 1 if count else 0, depths, dtype=torch.float64, device=matches.device)
    there = torch.zeros_like(grid)
    grid[chain, depth] = matches[:count].double()
    there[chain, depth] = 1.0 if left_out is None else (~left_out[:count]).double()
    # a hard loss leaves out rows outside the draft vocabulary: a chain is judged up to its first gap
    there = there.cumprod(1)
    return torch.stack(((grid.cumprod(1) * there).sum(0), there.sum(0)))


@torch.no_grad()
def validate(
    drafter: Drafter,
    target: Target,
    batches: Sequence[StepBatch],
    read: Callable[[StepBatch], tuple[Tensor, Tensor]],
    pack_length: int,
    settings: LossSettings,
    backend: Backend,
    world: World,
) -> Validation:
    """Run validation batches of one pack each, copied to the target's device one at a time, without gradients.

    read: auxiliary states [N, 3H] and hidden states [N, H] of such a batch.

    Each process of the world takes a share; the sums meet once.
    """
    stats = torch.zeros(3, settings.depths, dtype=torch.float64, device=target.device)
    joint = torch.zeros(2, 2, settings.depths, dtype=torch.float64, device=target.device)  # all chains; without loops
    for host in batches[world.rank :: world.size]:
        batch = host.to(target.device)
        (chunks,) = batch.packs
        aux, hidden = read(batch)
        for chunk, normed in forward_pack(drafter, chunks, aux, backend):
            result = head_loss(
                normed, drafter.lm_head_weight(), chunk.loss, hidden, target.lm_logits, settings, use_teacher=True
            )
            stats += result.stats
            joint[0] += joint_matches(chunk.loss, result.matches, settings.depths)
            assert batch.repeating is not None, "a validation batch knows where its text repeats"
            # the first token that the anchor's chain predicts
            loop = batch.repeating[0][(chunk.loss.anchor + 2).clamp(max=pack_length - 1)]
            joint[1] += joint_matches(chunk.loss, result.matches, settings.depths, loop)
    sums = torch.cat((stats.flatten(), joint.flatten()))
    world.all_reduce(sums)
    stats, joint = sums[: stats.numel()].view_as(stats), sums[stats.numel() :].view_as(joint)
    losses, matches, counts = stats.tolist()
    rates = [[hit / every if every else 0.0 for hit, every in zip(*of, strict=True)] for of in joint.tolist()]
    every, plain = joint[:, 1, 0].tolist()
    return Validation(
        loss=sum(losses) / max(sum(counts), 1.0),
        accuracy=[m / c if c else None for m, c in zip(matches, counts, strict=True)],
        acceptance_length=1.0 + sum(rates[0]),
        without_loops=1.0 + sum(rates[1]),
        loop_share=1.0 - plain / every if every else 0.0,
        joint=tuple(rates[1]),
    )
