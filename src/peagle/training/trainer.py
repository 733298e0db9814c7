"""The training loop: `train` opens target and answers, `train_on` prepares the run and steps through it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from peagle.config.training import TrainConfig
from peagle.drafter.head_folder import check_heads_config
from peagle.errors import InputError
from peagle.target.loading import load_target, parse_device
from peagle.target.model import Target
from peagle.target.sharding import check_alone_on_host
from peagle.training.answers import open_answers
from peagle.training.distributed import ALONE, World, join, leave
from peagle.training.estimate import estimate
from peagle.training.facts import run_facts
from peagle.training.learning_rate import learning_rate_factor
from peagle.training.logs import MetricsLog, write_json
from peagle.training.memory import fits
from peagle.training.plots import plot_run
from peagle.training.prefetch import prefetch
from peagle.training.prepare import Run, prepare
from peagle.training.progress import ProgressBar
from peagle.training.prove import prove_attention
from peagle.training.resume import save_run
from peagle.training.scan import Answers
from peagle.training.signals import stop_signals
from peagle.training.step import train_step
from peagle.training.train_state import log_values
from peagle.training.validate import Validation, validate
from peagle.training.weights import write_head


@dataclass(frozen=True)
class TrainResult:
    """How a run ended. head: the folder written when it finished, None when it was stopped early by a signal."""

    steps: int
    finished: bool
    head: Path | None
    validation: Validation | None


def train(config: TrainConfig, dry_run: bool = False, say: Callable[[str], None] = print) -> TrainResult | None:
    """Train a head as `config` says. Raises InputError for whatever the user has to change.

    dry_run: prepare everything, say what would be trained, and stop.
    """
    if config.target_device_map is not None:
        check_alone_on_host()
    device = str(parse_device(None if config.device == "auto" else config.device))
    world, device = join(device)
    try:
        if config.parallel == "fsdp" and world.size == 1:
            raise InputError("--parallel fsdp: only for several processes (torchrun); there is one")
        told = say if world.first else _say_nothing
        answers = open_answers(config.data, config.on_corrupt, told, config.hidden_states is not None)
        # with cached states embeddings and LM head are all that runs; a head may start from the last layers
        layers: Literal["device", "host", "none"] = "device"
        if config.hidden_states is not None:
            layers = "host" if config.init == "target" else "none"
        spread = "give it several GPUs with --target-device-map, or keep its states first (--hidden-states)"
        with fits(f"target: {config.target}", spread):
            target = load_target(
                config.target, config.dtype, torch.device(device), layers=layers, device_map=config.target_device_map
            )
        if target.tokenizer is not None:
            answers.check_target(target.tokenizer, target.vocab_size)
        return train_on(config, target, answers, dry_run, say, world)
    finally:
        leave()


def train_on(
    config: TrainConfig,
    target: Target,
    answers: Answers,
    dry_run: bool = False,
    say: Callable[[str], None] = print,
    world: World = ALONE,
) -> TrainResult | None:
    """`train` with a target and answers that are already open."""
    if not world.first:
        say = _say_nothing
    for name in ("head", "best"):
        check_heads_config(Path(config.output) / name)  # before the work that would be lost
    run = prepare(config, target, answers, say, world)
    try:
        if dry_run:
            estimate(run.plan, run.weights, run.target_states, run.state, say)
            return None
        return _train(run, say)
    finally:
        if run.weights.sharded is not None:
            run.weights.sharded.release()


def _train(run: Run, say: Callable[[str], None]) -> TrainResult:
    """Train to the end of the run, or until SIGTERM or SIGINT asks for a checkpoint and an end."""
    plan, weights, target_states, state = run.plan, run.weights, run.target_states, run.state
    config, world, folder = plan.config, plan.world, Path(plan.config.output)
    world.agree([0.0])  # all have read the folder before the first one writes there
    log: MetricsLog | None = None
    try:
        if world.first:
            folder.mkdir(parents=True, exist_ok=True)
            log = MetricsLog(folder, state.step, state.validated_at, config.tensorboard)
            facts = run_facts(plan, run.sources, weights.drafter.config, target_states.target.name_or_path)
            write_json(folder / "run.json", facts)
    except OSError as error:
        raise InputError(f"output: {folder} cannot be written ({error.strerror or error})") from error
    state.began = saved_at = time.monotonic()
    warmup, decay = config.warmup_steps, config.decay_share if config.schedule == "wsd" else None
    if plan.total_steps is not None:
        warmup = min(warmup, plan.total_steps // 10)
    bar = ProgressBar(plan.total_steps, config.max_minutes, state.step, state.elapsed(), not world.first)
    plan = run.plan = prove_attention(plan, weights, target_states, state.step)
    pinned = plan.device.type == "cuda"
    batches = prefetch(plan.maker, plan.schedule, state.step, plan.total_steps, pinned, target_states.read_ahead)
    state.sums.began = time.monotonic()
    try:
        with stop_signals() as stop, bar:
            while True:
                # clocks and signals differ between processes: decide together
                minutes = (time.monotonic() - saved_at) / 60
                now = [state.progress(plan.total_steps, config.max_minutes), float(stop.is_set()), minutes]
                progress, stopped, minutes = world.agree(now)
                if minutes >= config.save_minutes:
                    save_run(plan, run.sources, weights, state)
                    saved_at = time.monotonic()
                if progress >= 1.0 or stopped:
                    break
                batch = next(batches, None)
                if batch is None:
                    break
                lr = config.lr * learning_rate_factor(state.step, progress, warmup, config.min_lr_ratio, decay)
                norm = train_step(plan, weights, target_states, state, batch, lr, stop=stop.is_set)
                if norm is None:
                    stopped = 1.0
                    break
                state.step += 1
                state.documents += batch.documents
                state.tokens += batch.tokens
                bar.update(state.step, state.elapsed())
                if state.step % config.log_every == 0:
                    values = log_values(state, world, len(plan.schedule.documents), lr, norm)
                    if log is not None:
                        log.write(values)
                    bar.show(values)
                if plan.validation and state.step % config.validate_every == 0:
                    _validate(run, log)
                if state.step % config.save_every == 0:
                    save_run(plan, run.sources, weights, state)
                    saved_at = time.monotonic()
            finished = not stopped or progress >= 1.0
            # whoever stops a run wants it back; a finished one may be given a higher limit later
            save_run(plan, run.sources, weights, state)
            if not finished:
                say(f"stopped at step {state.step}; run the same command again to go on")
                return TrainResult(state.step, False, None, state.validation)
            if plan.validation and state.validated_at != state.step:
                _validate(run, log)
                save_run(plan, run.sources, weights, state)  # a higher limit goes on from its figures, too
    finally:
        batches.close()
        if log is not None:
            log.close()
    head = folder / "head"
    write_head(head, weights, target_states.target, world, run.token_counts)
    if world.first:
        plot_run(folder)
    say(f"wrote {head} after {state.step} steps, {state.documents} documents, {state.tokens:,} tokens")
    return TrainResult(state.step, True, head, state.validation)


def _validate(run: Run, log: MetricsLog | None) -> None:
    """Validate the weights that a head would be written with; the best one so far is written."""
    plan, weights, target_states, state = run.plan, run.weights, run.target_states, run.state
    paused = time.monotonic()
    what = f"validation_documents: validation with chunks of {plan.sizes.chunk_size} anchors"
    with weights.as_written(), fits(what, "lower --chunk-size first, then --loss-rows"):
        found = validate(
            weights.copy.compute,
            target_states.target,
            plan.validation,
            lambda batch: target_states.read(batch, 0, 1),
            plan.config.pack_length,
            plan.loss,
            plan.backend,
            plan.world,
        )
    state.validation, state.validated_at = found, state.step
    if found.without_loops > state.best:
        state.best = found.without_loops
        best = Path(plan.config.output) / "best"
        write_head(best, weights, target_states.target, plan.world, run.token_counts)
    if log is None:
        return
    log.write(found.log_values(state.step))
    tqdm.write(found.summary(state.step), file=sys.stderr)
    state.sums.began += time.monotonic() - paused  # tokens/s counts training only


def _say_nothing(_message: str) -> None:
    pass
