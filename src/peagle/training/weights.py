"""The head under training: its weights, the copy that runs, the optimizer, the moving average; and writing it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from peagle.drafter.draft_vocabulary import write_draft_vocabulary
from peagle.drafter.model import Drafter
from peagle.drafter.saving import save_drafter
from peagle.target.model import Target
from peagle.training.average import WeightAverage
from peagle.training.distributed import World
from peagle.training.fuse import fuse_elementwise
from peagle.training.optimizer import Optimizer
from peagle.training.plan import Plan
from peagle.training.precision import ComputeCopy
from peagle.training.sharded import ShardedDrafter


@dataclass
class Weights:
    """`drafter` is optimised, `copy.compute` runs. sharded: `copy` where the processes share one head (FSDP)."""

    drafter: Drafter
    copy: ComputeCopy | ShardedDrafter
    sharded: ShardedDrafter | None
    parameters: list[nn.Parameter]  # those that are trained
    optimizer: Optimizer
    average: WeightAverage | None
    fused: bool  # layers run compiled; what proves the attention may give it up

    def forget_gradients(self) -> None:
        """Drop what a step that is not finished has left; every process calls it."""
        if self.sharded is not None:
            self.sharded.forget()
        self.optimizer.zero_grad()

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Within, the weights that a head is written with: the moving average where there is one."""
        if self.average is None:
            yield
            return
        with self.average.in_place():
            self.copy.refresh()
            yield
        self.copy.refresh()


def make_weights(plan: Plan, drafter: Drafter, target: Target) -> Weights:
    """All processes get the first one's weights, whole or in shards, and bind the target's; all of them call it."""
    config, world = plan.config, plan.world
    world.same_weights(list(drafter.parameters()))
    sharded: ShardedDrafter | None = None
    if config.parallel == "fsdp" and world.size > 1:
        sharded = ShardedDrafter(drafter, plan.dtype)
    copy = sharded or ComputeCopy(drafter, plan.dtype)
    copy.bind(target.embed_weight, target.lm_head_weight)
    copy.compute.checkpoint_layers = config.activation_checkpointing
    fused = plan.compiled and plan.backend != "dense"
    if fused:
        fuse_elementwise(copy.compute)
    parameters = [p for p in drafter.parameters() if p.requires_grad]
    return Weights(
        drafter=drafter,
        copy=copy,
        sharded=sharded,
        parameters=parameters,
        optimizer=Optimizer(drafter, config, fused=plan.device.type == "cuda"),
        average=None if config.ema_decay is None else WeightAverage(parameters, config.ema_decay),
        fused=fused,
    )


def write_head(
    folder: Path, weights: Weights, target: Target, world: World, token_counts: NDArray[np.int64] | None
) -> None:
    """Write the head as it is now (every process calls this, the first one writes).

    token_counts [V]: of the answers, for the list of frequent tokens that a CPU drafts from; None for no list.
    """
    more: Callable[[Path], object] | None = None
    if token_counts is not None and token_counts.any():
        more = functools.partial(write_draft_vocabulary, counts=token_counts)
    with weights.as_written():
        drafter = weights.drafter
        if weights.sharded is not None:
            drafter = weights.sharded.whole()
            drafter.bind(target.embed_weight, target.lm_head_weight)
        if world.first:
            save_drafter(drafter, folder, target_name=target.name_or_path, more=more)
