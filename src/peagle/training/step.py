"""One optimizer step: states in, gradients of every pack, one update."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle.target.model import Target
from peagle.training.batches import StepBatch
from peagle.training.chunks import Chunk
from peagle.training.losses import head_loss
from peagle.training.memory import fits
from peagle.training.partition import PassResult, train_pack
from peagle.training.plan import Plan
from peagle.training.sharded import full
from peagle.training.target_states import TargetStates
from peagle.training.train_state import TrainState
from peagle.training.weights import Weights

Mark = Callable[[str], None]  # called at the end of each part of a step, with its name (`timing.Marks`)


class GivenUp(Exception):
    """A step is left between two packs or chunks because the run is to stop."""


def unmarked(_name: str) -> None:
    pass


def never() -> bool:
    return False


def train_step(
    plan: Plan,
    weights: Weights,
    target_states: TargetStates,
    state: TrainState,
    host: StepBatch,
    lr: float,
    mark: Mark = unmarked,
    stop: Callable[[], bool] = never,
) -> Tensor | None:
    """Train on a batch; returns the gradient norm, on the device. Loss and statistics are added to `state.sums`.

    stop: asked between packs and chunks, for a step may take longer than a stopped run is given to end. Once any
    process's says yes, all give the step up, as if it had not begun, and None is returned.
    Raises InputError when memory runs out.
    """
    mark("waiting for data")
    batch = host.to(plan.device) if plan.device.type != "cpu" else host
    n, sums = plan.config.pack_length, state.sums
    with fits("packs_per_step: the target's states of a step", "lower --packs-per-step, then --pack-length"):
        whole = target_states.read_all(batch)
    if whole is not None:
        mark("target forward")
    if weights.sharded is not None:
        batch = weights.sharded.share(batch, plan.world)
    loss = torch.zeros((), dtype=torch.float64, device=plan.device)
    stats = torch.zeros_like(sums.stats)
    given_up = False
    try:
        for i, chunks in enumerate(batch.packs):
            if stop():  # a long pack's target forward comes before its first chunk
                raise GivenUp
            if whole is not None:
                aux, hidden = (of_all[i * n : (i + 1) * n] for of_all in whole)
            else:
                aux, hidden = target_states.read_kept(batch, i, 1)
                mark("target forward")
            result = pack_gradients(plan, weights, target_states.target, chunks, aux, hidden, mark, stop)
            stats += result.stats
            loss += result.loss.double()
    except GivenUp:
        given_up = True
    if plan.world.agree([float(given_up)])[0]:
        weights.forget_gradients()
        return None
    sums.stats += stats
    with fits("layers: gradients and optimizer of the head", "lower --layers, or use more GPUs with --parallel fsdp"):
        if weights.sharded is not None:
            weights.sharded.collect()
            plan.world.all_reduce(loss)
            sums.loss += loss / plan.world.size
        else:
            sums.loss += plan.world.mean_gradients(weights.parameters, loss, batch.weight if batch.rows else 0.0)
        norm = full(torch.nn.utils.clip_grad_norm_(weights.parameters, plan.config.grad_clip))
        weights.optimizer.step(lr)
        weights.optimizer.zero_grad()
        if weights.average is not None:
            weights.average.update(state.step)
        weights.copy.refresh()
    mark("optimizer")
    sums.steps += 1
    sums.tokens += batch.tokens
    return norm


def pack_gradients(
    plan: Plan,
    weights: Weights,
    target: Target,
    chunks: Sequence[Chunk],
    aux: Tensor,
    hidden: Tensor,
    mark: Mark = unmarked,
    stop: Callable[[], bool] = never,
) -> PassResult:
    """Forward and backward over one pack, on its auxiliary states [N, 3H] and hidden states [N, H]; gradients are added
    to the parameters' own. Raises GivenUp between two chunks when `stop` says so."""
    drafter = weights.copy.compute

    def chunk_loss(normed: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        mark("drafter forward")
        if stop():
            raise GivenUp
        result = head_loss(normed, drafter.lm_head_weight(), chunk.loss, hidden, target.lm_logits, plan.loss)
        mark("loss slices")
        return result.loss, result.stats

    what = f"chunk_size: a chunk of {plan.sizes.chunk_size} anchors with {plan.sizes.loss_rows} rows a loss slice"
    with fits(what, "lower --chunk-size first, then --loss-rows"):
        result = train_pack(drafter, chunks, aux, chunk_loss, plan.backend)
    mark("drafter backward")  # and the later chunks' forward, where a pack has several
    return result
