"""What the flags come to on this device: all that is fixed before a run's first step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peagle.config.training import TrainConfig
from peagle.drafter.config import DrafterConfig
from peagle.target.model import Target
from peagle.training.attention import BLOCK, Backend, choose_backend
from peagle.training.batches import BatchMaker, StepBatch
from peagle.training.chunks import round_up
from peagle.training.distributed import World
from peagle.training.draft_vocab import DraftVocab
from peagle.training.eagle3 import step_weights
from peagle.training.encode import call_overhead
from peagle.training.losses import LossKernel, LossSettings
from peagle.training.memory import Sizes, choose_sizes
from peagle.training.scan import Answers, Scan, split_validation
from peagle.training.schedule import Schedule

CHEAP_CALL = 256  # overhead in tokens up to which documents may be read one by one: a CPU, or a target of about 2B


@dataclass(frozen=True)
class Plan:
    """How a run computes, and on what at which step. total_steps: None when only the clock ends the run."""

    config: TrainConfig
    world: World
    device: torch.device
    dtype: torch.dtype  # that the head computes in
    backend: Backend
    compiled: bool
    loss: LossSettings
    sizes: Sizes
    maker: BatchMaker
    schedule: Schedule
    held: Schedule  # of the documents that validate, one pack a step
    validation: list[StepBatch]
    total_steps: int | None


def compute_dtype(config: TrainConfig, target: Target) -> torch.dtype:
    """What the head computes in, beside this target."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes.get(config.dtype, torch.bfloat16 if target.device.type == "cuda" else torch.float32)


def make_plan(
    config: TrainConfig,
    target: Target,
    answers: Answers,
    scan: Scan,
    head: DrafterConfig,
    vocab: DraftVocab | None,
    world: World,
    *,
    stored: bool,
    sizes: dict[str, int],
) -> Plan:
    """The plan of a run. stored: the target's states are read from files. sizes: those that a resumed run began with,
    which it keeps, so that its sums round the same way. Raises InputError for attention that the device has not."""
    device = target.device
    cuda = device.type == "cuda"
    dtype = compute_dtype(config, target)
    attention = "dense" if config.attention == "auto" and config.compile == "off" else config.attention
    backend = choose_backend(attention, device, dtype, head.head_dim)
    compiled = config.compile == "auto" and cuda
    kernel: LossKernel = "plain" if not compiled else "triton" if config.loss_kernel == "auto" else "compile"

    chosen = choose_sizes(config, head, device, dtype, backend, sizes)
    draft_ids = None if vocab is None else vocab.draft_ids()
    lengths = np.zeros(int(scan.documents.max()) + 1, dtype=np.int64)
    lengths[scan.documents] = scan.lengths
    maker = _batch_maker(config, target, answers, head, draft_ids, backend, chosen, world, stored)
    maker = replace(maker, lengths=lengths)
    training, held = split_validation(scan, config.validation_documents, config.seed)
    schedule = Schedule(
        scan.documents[training], scan.lengths[training], config.pack_length, config.packs_per_step, config.seed
    )
    validating = Schedule(scan.documents[held], scan.lengths[held], config.pack_length, 1, config.seed)
    return Plan(
        config=config,
        world=world,
        device=device,
        dtype=dtype,
        backend=backend,
        compiled=compiled,
        loss=LossSettings(
            kind=config.loss,
            depths=config.depths,
            kernel=kernel,
            target_ids=None if vocab is None else vocab.target_ids.to(device),
            unreached_weight=config.unreached_weight,
        ),
        sizes=chosen,
        maker=maker,
        schedule=schedule,
        held=validating,
        validation=_validation_batches(maker, validating),
        total_steps=_total_steps(config, schedule),
    )


def on_dense_attention(plan: Plan, head: DrafterConfig) -> Plan:
    """The plan with dense attention: chunks and filler rows are others, and batches are laid out anew."""
    sizes = choose_sizes(plan.config, head, plan.device, plan.dtype, "dense", {})
    maker = replace(
        plan.maker, chunk_size=sizes.chunk_size, slice_rows=sizes.loss_rows, row_multiple=_row_multiple("dense", sizes)
    )
    validation = _validation_batches(maker, plan.held)
    return replace(plan, backend="dense", sizes=sizes, maker=maker, validation=validation)


def _row_multiple(backend: Backend, sizes: Sizes) -> int:
    # few shapes for the compiler: a quarter of a chunk costs 3 % of fillers on average at K = 8, r = 0.8
    return round_up(max(sizes.chunk_size // 4, BLOCK), BLOCK) if backend != "dense" else 1


def _batch_maker(
    config: TrainConfig,
    target: Target,
    answers: Answers,
    head: DrafterConfig,
    draft_ids: Tensor | None,
    backend: Backend,
    sizes: Sizes,
    world: World,
    stored: bool,
) -> BatchMaker:
    cuda, stepwise = target.device.type == "cuda", config.kind == "eagle3"
    overhead = call_overhead(target) if cuda else 64
    together = max(config.pack_length, 32768 if cuda else 4096)
    if config.state_cache_gib and overhead <= CHEAP_CALL:
        together = 0  # each document alone, so that what is kept of it does not depend on the step that needed it first
    return BatchMaker(
        answers=answers,
        pack_length=config.pack_length,
        chunk_size=sizes.chunk_size,
        depths=config.depths,
        keep_rate=1.0 if stepwise else config.keep_rate,
        mask_token_id=head.mask_token_id,
        stepwise=stepwise,
        hard=config.loss == "hard",
        depth_weights=step_weights(config.depths, config.ttt_decay if stepwise else config.depth_decay),
        draft_ids=draft_ids,
        row_multiple=_row_multiple(backend, sizes),
        slice_rows=sizes.loss_rows,
        loss_multiple=BLOCK if cuda else 1,  # whole tiles for the matrix products
        seed=config.seed,
        encode_tokens=together,
        encode_overhead=overhead,
        encode_multiple=64 if cuda else 1,
        stored=stored,
        rank=world.rank,
        world=world.size,
    )


def _validation_batches(maker: BatchMaker, held: Schedule) -> list[StepBatch]:
    whole = replace(maker, rank=0, world=1)  # processes share the batches, each of one pack
    return [whole.make(i, packs, stream=2, find_loops=True) for i, packs in enumerate(held.epoch(0))]


def _total_steps(config: TrainConfig, schedule: Schedule) -> int | None:
    epochs = config.epochs
    if (config.max_steps, epochs, config.max_samples, config.max_minutes) == (None, None, None, None):
        epochs = 1
    return schedule.steps_for(config.max_steps, epochs, config.max_samples)
