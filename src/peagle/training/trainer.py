"""The training loop: read top to bottom, `train` prepares and `Trainer.run` steps."""

from __future__ import annotations

import hashlib
import math
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

import peagle
from peagle.config import TrainConfig
from peagle.data.dataset import open_dataset
from peagle.drafter.checkpoint import save_drafter
from peagle.errors import InputError
from peagle.target.loading import load_target
from peagle.target.model import Target
from peagle.training.attention import BLOCK, choose_backend
from peagle.training.average import WeightAverage, local
from peagle.training.batches import BatchMaker, StepBatch
from peagle.training.checkpoints import checkpoint_folders, load_latest, save_checkpoint
from peagle.training.chunks import Chunk, round_up
from peagle.training.distributed import World, join, leave
from peagle.training.draft_vocab import choose_draft_vocab
from peagle.training.eagle3 import step_weights
from peagle.training.encode import call_overhead, encode_packs
from peagle.training.fuse import fuse_elementwise, unfuse
from peagle.training.identity import target_identity
from peagle.training.init import choose_mask_token, new_drafter
from peagle.training.init_from_head import mask_token_of
from peagle.training.learning_rate import learning_rate_factor
from peagle.training.logs import MetricsLog, write_json
from peagle.training.losses import LossKernel, LossSettings, head_loss
from peagle.training.memory import budget, choose_chunk_size, choose_loss_rows, fits, peak_memory
from peagle.training.optimizer import Optimizer
from peagle.training.partition import PassResult, train_pack
from peagle.training.plots import plot_run
from peagle.training.precision import ComputeCopy
from peagle.training.prefetch import prefetch
from peagle.training.progress import ProgressBar
from peagle.training.scan import Answers, scan_answers, split_validation
from peagle.training.schedule import Schedule
from peagle.training.sharded import ShardedDrafter, full, load_optimizer, load_tensors, load_weights, whole
from peagle.training.signals import stop_signals
from peagle.training.state_cache import StateCache
from peagle.training.states import StoredStates, open_states
from peagle.training.validate import Validation, validate

ALONE = World()
ENCODE_BYTES = 2 << 30  # auxiliary and hidden states of the packs that are encoded together
STATE_FORMAT = 2


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
    automatic = "cuda" if torch.cuda.is_available() else "cpu"
    device = automatic if config.device == "auto" else config.device
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device: got {config.device!r}, but PyTorch finds no CUDA device")
    world, device = join(device)
    try:
        answers = open_dataset(list(config.data))
        # with cached states embeddings and LM head are all that runs; a head may start from the last layers
        layers: Literal["device", "host", "none"] = "device"
        if config.hidden_states is not None:
            layers = "host" if config.init == "target" else "none"
        target = load_target(config.target, dtype=config.dtype, device=torch.device(device), layers=layers)
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
    trainer = Trainer(config, target, answers, say, world)
    if dry_run:
        trainer.estimate()
        return None
    return trainer.run()


class Trainer:
    """A run: what it is made of, where it stands, and its loop."""

    def __init__(
        self,
        config: TrainConfig,
        target: Target,
        answers: Answers,
        say: Callable[[str], None],
        world: World = ALONE,
    ) -> None:
        self.config, self.target, self.world = config, target, world
        self.say = say = say if world.first else lambda _message: None
        self.device = target.device
        self.folder = Path(config.output)
        self.step = 0
        self.elapsed = 0.0  # seconds of training before this process
        self.fingerprint = answers.fingerprint
        self.stored: StoredStates | None = None
        left_out: list[int] = []
        if config.hidden_states is not None:
            self.stored, left_out = open_states(Path(config.hidden_states), config.on_corrupt, world, say)
            if left_out:  # other data, as far as going on with a run is concerned
                self.fingerprint = hashlib.sha256(f"{self.fingerprint} without {left_out}".encode()).hexdigest()
        saved = self._saved_state()
        stepwise = config.kind == "eagle3"

        dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
        default = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.dtype = dtypes.get(config.dtype, default)
        attention = "dense" if config.attention == "auto" and config.compile == "off" else config.attention
        self.backend = choose_backend(attention, self.device)
        cuda = self.device.type == "cuda"
        compiled = config.compile == "auto" and cuda
        kernel: LossKernel = "plain" if not compiled else "triton" if config.loss_kernel == "auto" else "compile"

        scan = scan_answers(answers, config.pack_length, target.vocab_size)
        scan = scan.without(left_out)
        say(f"data: {scan.summary()}")
        wanted = config.mask_token_id
        if wanted is None and config.init_head is not None:
            wanted = mask_token_of(config.init_head)
        mask_token = None if stepwise else choose_mask_token(target, scan.seen, wanted)
        vocab = None
        if config.draft_vocab_size is not None and config.draft_vocab_size != target.vocab_size:
            vocab = choose_draft_vocab(answers.token_counts(target.vocab_size), config.draft_vocab_size)
            kept = f"{config.draft_vocab_size} of {target.vocab_size} ids"
            say(f"draft vocabulary: {kept}, {vocab.coverage:.2%} of the answers' tokens")
        self.drafter, remarks = new_drafter(config, target, mask_token, vocab)
        for remark in remarks:
            say(remark)
        if self.stored is not None:
            self.stored.check(
                target=target_identity(target),
                data=answers.fingerprint,
                aux_layer_ids=self.drafter.config.aux_hidden_state_layer_ids,
                documents=scan.documents,
                lengths=scan.lengths,
            )
            say(f"target states: {self.states_name()} from {config.hidden_states}")
        if mask_token is not None:
            say(f"mask token: {mask_token}")

        if self.backend == "flex" and self.device.type != "cuda":
            raise InputError(f"attention: got 'flex', which needs a CUDA device (this run is on {self.device})")
        self.mask_token, self.draft_ids = mask_token, None if vocab is None else vocab.draft_ids()
        self.answers = answers
        # sizes come from memory, but a resumed run keeps those it began with, so that its sums round the same way
        self._choose_sizes((saved or {}).get("sizes", {}))
        self.maker = self._batch_maker()
        self.loss = LossSettings(
            kind=config.loss,
            depths=config.depths,
            kernel=kernel,
            target_ids=None if vocab is None else vocab.target_ids.to(self.device),
            unreached_weight=config.unreached_weight,
        )
        training, held = split_validation(scan, config.validation_documents, config.seed)
        self.schedule = Schedule(
            scan.documents[training], scan.lengths[training], config.pack_length, config.packs_per_step, config.seed
        )
        self.held = (scan.documents[held], scan.lengths[held])
        self.validation = self._validation_batches()
        self.total_steps = self._total_steps()

        # weights and optimizer
        world.same_weights(list(self.drafter.parameters()))
        self.sharded: ShardedDrafter | None = None
        if config.parallel == "fsdp" and world.size > 1:
            self.sharded = ShardedDrafter(self.drafter, self.dtype)
        self.copy = self.sharded or ComputeCopy(self.drafter, self.dtype)
        self.copy.bind(target.embed_weight, target.lm_head_weight)
        self.fused = compiled and self.backend == "flex"
        if self.fused:
            fuse_elementwise(self.copy.compute)
        self.mark: Callable[[str], None] = lambda _name: None  # a benchmark puts `timing.Marks` here
        self.parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = Optimizer(self.drafter, config, fused=cuda)
        self.average = None if config.ema_decay is None else WeightAverage(self.parameters, config.ema_decay)
        self.state_cache = StateCache(int(config.state_cache_gib * 2**30), int(scan.lengths[training].sum()))
        self.stats = torch.zeros(3, config.depths, dtype=torch.float64, device=self.device)  # since the last log
        self.log_loss = torch.zeros((), dtype=torch.float64, device=self.device)
        self.log_steps = self.log_tokens = 0
        self.documents = self.tokens = 0
        self.last_validation: Validation | None = None
        self.validated_at = -1
        self.best = 0.0  # acceptance length without repeating text, of the head in best/
        if saved is not None:
            self._restore(saved)
        self.copy.refresh()
        self._describe(scan.lengths[training])
        if config.packs_per_step % world.size:
            say(
                f"packs_per_step: {config.packs_per_step} packs on {world.size} processes leave some idle at "
                "the end of a step; a multiple does not"
            )

    # -- preparing ------------------------------------------------------------------------------------------------

    def estimate(self, steps: int = 2) -> None:
        """Do a few steps whose results nobody keeps, and say what the run will take."""
        self.prove_attention()
        epoch, at = self.schedule.locate(0)
        packs = self.schedule.epoch(epoch)[at]
        tokens = 0
        for i in range(steps + 1):
            batch = self.maker.make(i, packs, stream=1)
            if i == 1:  # the first one warms up
                float(self.log_loss)  # waits for the device
                began, tokens = time.perf_counter(), 0
            self.train_step(batch, self.config.lr)
            tokens += batch.tokens
        float(self.log_loss)
        seconds = (time.perf_counter() - began) / steps
        minutes, limit = self.config.max_minutes, self.total_steps
        reached = math.inf if limit is None else limit
        if minutes is not None:
            reached = min(reached, 60 * minutes / seconds)
        gib = 2**30
        trained = sum(p.numel() for p in self.parameters)
        held = sum(p.numel() * p.element_size() for p in self.target.model.parameters() if p.device == self.device)
        self.say(
            f"memory: peak {peak_memory(self.device) / gib:.2f} GiB on {self.device}: {held / gib:.2f} GiB the target, "
            f"{16 * trained / gib:.2f} GiB weights, gradients and Adam's moments in float32"
        )
        self.say(
            f"time: {seconds:.2f} s a step, {tokens / steps / seconds:,.0f} tokens/s (measured over {steps} steps, "
            f"without validation): {reached:,.0f} steps, {reached * seconds / 60:.1f} minutes"
        )

    def _saved_state(self) -> dict[str, Any] | None:
        """The checkpoint to go on from, checked against this configuration; None for a new run."""
        folder = self.folder / "checkpoints"
        if not checkpoint_folders(folder):
            return None
        if self.config.resume == "never":
            raise InputError(f"output: {self.folder} holds a run already, expected an empty folder or resume auto")
        saved = load_latest(folder)
        if saved is None:
            raise InputError(f"output: none of the checkpoints in {folder} can be read; delete them to start again")
        if saved.get("format") != STATE_FORMAT:
            raise InputError(f"output: checkpoints in {folder} are of format {saved.get('format')}, not {STATE_FORMAT}")
        changed = self.config.differences(saved["config"])
        # where target, data and states lie may change, what they are may not
        changed = [line for line in changed if not line.startswith(("target:", "data:", "hidden_states:"))]
        if saved.get("states", "online") != self.states_name():
            changed.append(f"hidden_states: {saved.get('states', 'online')} -> {self.states_name()}")
        if saved["data"] != self.fingerprint:
            changed.append(f"data: fingerprint {saved['data'][:16]} -> {self.fingerprint[:16]}")
        if saved["target"] != target_identity(self.target):
            changed.append(f"target: fingerprint {saved['target']} -> {target_identity(self.target)}")
        if changed:
            raise InputError(
                f"output: {self.folder} holds a run with other settings, which cannot be resumed with these "
                f"({'; '.join(changed)}); use another output folder or the old settings"
            )
        return saved

    def _choose_sizes(self, sizes: dict[str, int]) -> None:
        config, head = self.config, self.drafter.config
        keep_rate = 1.0 if config.kind == "eagle3" else config.keep_rate
        room, itemsize = budget(self.device), self.dtype.itemsize
        chunk, rows = config.chunk_size, config.loss_rows
        if chunk == "auto":
            chunk = sizes.get("chunk_size") or choose_chunk_size(
                head, config.pack_length, config.depths, keep_rate, self.backend, itemsize, room
            )
        if rows == "auto":
            rows = sizes.get("loss_rows") or choose_loss_rows(
                self.target.vocab_size, head.draft_vocab_size, self.device, itemsize, room
            )
        self.chunk_size, self.loss_rows = min(chunk, config.pack_length), rows

    def _batch_maker(self) -> BatchMaker:
        config, cuda = self.config, self.device.type == "cuda"
        stepwise = config.kind == "eagle3"
        # few shapes for the compiler: a quarter of a chunk costs 3 % of fillers on average at K = 8, r = 0.8
        multiple = round_up(max(self.chunk_size // 4, BLOCK), BLOCK) if self.backend == "flex" else 1
        return BatchMaker(
            answers=self.answers,
            pack_length=config.pack_length,
            chunk_size=self.chunk_size,
            depths=config.depths,
            keep_rate=1.0 if stepwise else config.keep_rate,
            mask_token_id=self.mask_token,
            stepwise=stepwise,
            hard=config.loss == "hard",
            depth_weights=step_weights(config.depths, config.ttt_decay if stepwise else config.depth_decay),
            draft_ids=self.draft_ids,
            row_multiple=multiple,
            slice_rows=self.loss_rows,
            loss_multiple=BLOCK if cuda else 1,  # whole tiles for the matrix products
            seed=config.seed,
            encode_tokens=max(config.pack_length, 32768 if cuda else 4096),
            encode_overhead=call_overhead(self.target) if cuda else 64,
            encode_multiple=64 if cuda else 1,
            stored=self.stored is not None,
            rank=self.world.rank,
            world=self.world.size,
        )

    def _validation_batches(self) -> list[StepBatch]:
        documents, lengths = self.held
        if not len(documents):
            return []
        schedule = Schedule(documents, lengths, self.config.pack_length, 1, self.config.seed)
        whole = replace(self.maker, rank=0, world=1)  # processes share the batches, each of one pack
        return [whole.make(i, packs, stream=2, find_loops=True) for i, packs in enumerate(schedule.epoch(0))]

    def _total_steps(self) -> int | None:
        """Steps that the step limits allow; None when only the clock ends the run."""
        config = self.config
        epochs = config.epochs
        if (config.max_steps, epochs, config.max_samples, config.max_minutes) == (None, None, None, None):
            epochs = 1
        return self.schedule.steps_for(config.max_steps, epochs, config.max_samples)

    def _describe(self, lengths: np.ndarray) -> None:
        trainable = sum(p.numel() for p in self.parameters)
        frozen = sum(p.numel() for p in self.drafter.parameters()) - trainable
        per_epoch = len(self.schedule.epoch(0))
        steps = f"{self.total_steps} steps" if self.total_steps is not None else f"{self.config.max_minutes:g} minutes"
        self.say(
            f"{self.config.kind}: {trainable:,} parameters to train, {frozen:,} own and frozen; {self.config.layers} "
            f"layer(s), depths {self.config.depths}"
        )
        self.say(
            f"{steps}; an epoch is {per_epoch} steps, {int(lengths.sum()):,} tokens, {len(lengths)} documents; "
            f"{self.config.packs_per_step} packs of {self.config.pack_length} a step; chunks of {self.chunk_size}, "
            f"{self.loss_rows} rows a loss slice; {self.backend} attention, {self.dtype} on {self.device}"
        )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "format": STATE_FORMAT,
            "step": self.step,
            "elapsed": self._elapsed(),
            "config": self.config.to_dict(),
            "data": self.fingerprint,
            "target": target_identity(self.target),
            "states": self.states_name(),
            "sizes": {"chunk_size": self.chunk_size, "loss_rows": self.loss_rows},
            "drafter": self.drafter.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": None if self.average is None else self.average.averages,
            "rng": torch.get_rng_state(),
            "log": {
                "stats": self.stats,
                "loss": self.log_loss,
                "steps": self.log_steps,
                "tokens": self.log_tokens,
            },
            "documents": self.documents,
            "tokens": self.tokens,
            "best": self.best,
            "validated_at": self.validated_at,
            "validation": None if self.last_validation is None else asdict(self.last_validation),
        }

    def _restore(self, saved: dict[str, Any]) -> None:
        load_weights(self.drafter, saved["drafter"])
        load_optimizer(self.optimizer, saved["optimizer"])
        if self.average is not None:
            load_tensors(self.average.averages, saved["average"])
        torch.set_rng_state(saved["rng"])
        self.step, self.elapsed = saved["step"], saved["elapsed"]
        self.documents, self.tokens = saved["documents"], saved["tokens"]
        self.best = saved.get("best", 0.0)
        self.validated_at = saved.get("validated_at", self.step - 1)
        if saved.get("validation") is not None:
            self.last_validation = Validation(**saved["validation"])
        log = saved["log"]
        self.stats, self.log_loss = log["stats"].to(self.device), log["loss"].to(self.device)
        self.log_steps, self.log_tokens = log["steps"], log["tokens"]
        self.copy.refresh()
        self.say(f"resumed at step {self.step}")

    def save(self) -> Path:
        """Write a checkpoint of the current step (every process calls this, the first one writes)."""
        self._collect_stats()
        folder = self.folder / "checkpoints"
        finite = all(bool(p.isfinite().all()) for p in local(self.parameters))
        if self.world.agree([float(not finite)])[0]:
            raise InputError(f"lr: training diverged before step {self.step} (weights are not finite); lower it")
        state: dict[str, Any] = {}
        if self.sharded is not None:
            state = whole(self._state(), keep=self.world.first)
            self.copy.refresh()
        elif self.world.first:
            state = self._state()
        if not self.world.first:
            return folder
        return save_checkpoint(folder, self.step, state, self.config.keep_checkpoints)

    # -- the loop -------------------------------------------------------------------------------------------------

    def _elapsed(self) -> float:
        return self.elapsed + (time.monotonic() - self.began if hasattr(self, "began") else 0.0)

    def _collect_stats(self) -> None:
        """Bring the sums since the last log to the first process."""
        if self.world.size > 1:
            self.world.all_reduce(self.stats)
            if not self.world.first:
                self.stats.zero_()

    def progress(self) -> float:
        """Share of the run that is done, by its nearest limit."""
        shares = [0.0]
        if self.total_steps is not None:
            shares.append(self.step / max(self.total_steps, 1))
        if self.config.max_minutes is not None:
            shares.append(self._elapsed() / (60 * self.config.max_minutes))
        return max(shares)

    def run(self) -> TrainResult:
        """Train to the end of the run, or until SIGTERM or SIGINT asks for a checkpoint and an end."""
        config = self.config
        self.world.agree([0.0])  # all have read the folder before the first one writes there
        log: MetricsLog | None = None
        try:
            if self.world.first:
                self.folder.mkdir(parents=True, exist_ok=True)
                log = MetricsLog(self.folder, self.step, self.validated_at, config.tensorboard)
                write_json(self.folder / "run.json", self._facts())
        except OSError as error:
            raise InputError(f"output: {self.folder} cannot be written ({error.strerror or error})") from error
        self.began = time.monotonic()
        saved_at = self.began
        warmup, decay = config.warmup_steps, config.decay_share if config.schedule == "wsd" else None
        if self.total_steps is not None:
            warmup = min(warmup, self.total_steps // 10)
        bar = ProgressBar(self.total_steps, config.max_minutes, self.step, self._elapsed(), not self.world.first)
        self.prove_attention()
        batches = prefetch(self.maker, self.schedule, self.step, self.total_steps, self.device.type == "cuda")
        self.log_began = time.monotonic()
        try:
            with stop_signals() as stop, bar:
                while True:
                    # clocks and signals differ between processes: decide together
                    minutes = (time.monotonic() - saved_at) / 60
                    now = [self.progress(), float(stop.is_set()), minutes]
                    progress, stopped, minutes = self.world.agree(now)
                    if minutes >= config.save_minutes:
                        self.save()
                        saved_at = time.monotonic()
                    if progress >= 1.0 or stopped:
                        break
                    batch = next(batches, None)
                    if batch is None:
                        break
                    factor = learning_rate_factor(self.step, progress, warmup, config.min_lr_ratio, decay)
                    norm = self.train_step(batch, config.lr * factor)
                    self.step += 1
                    self.documents += batch.documents
                    self.tokens += batch.tokens
                    bar.update(self.step, self._elapsed())
                    if self.step % config.log_every == 0:
                        bar.show(self._log(log, config.lr * factor, norm))
                    if self.validation and self.step % config.validate_every == 0:
                        self._validate(log)
                    if self.step % config.save_every == 0:
                        self.save()
                        saved_at = time.monotonic()
                finished = not stopped or progress >= 1.0
                # whoever stops a run wants it back; a finished one may be given a higher limit later
                self.save()
                if not finished:
                    self.say(f"stopped at step {self.step}; run the same command again to go on")
                    return TrainResult(self.step, False, None, self.last_validation)
                if self.validation and self.validated_at != self.step:
                    self._validate(log)
        finally:
            batches.close()
            if log is not None:
                log.close()
        head = self.folder / "head"
        self.write_head(head)
        if self.world.first:
            plot_run(self.folder)
        self.say(f"wrote {head} after {self.step} steps, {self.documents} documents, {self.tokens:,} tokens")
        return TrainResult(self.step, True, head, self.last_validation)

    def train_step(self, host: StepBatch, lr: float) -> Tensor:
        """One optimizer step; returns the gradient norm, on the device."""
        self.mark("waiting for data")
        batch = host.to(self.device) if self.device.type != "cpu" else host
        n, count = self.config.pack_length, len(batch.packs)
        width = self.target.hidden_size
        per_pack = n * (self.drafter.config.aux_size * self.dtype.itemsize + width * self.target.dtype.itemsize)
        together = count * per_pack <= ENCODE_BYTES
        if together and count:
            states = self.state_cache.get(batch.placed, count * n)
            if states is None:
                states = self.read_states(batch, 0, count)
                self.state_cache.put(batch.placed, *states)
            aux, hidden = states
            self.mark("target forward")
        if self.sharded is not None:
            batch = self.sharded.share(batch, self.world)
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, chunks in enumerate(batch.packs):
            if together:
                span = slice(i * n, (i + 1) * n)
                result = self.train_pack(chunks, aux[span], hidden[span])
            else:
                one_aux, one_hidden = self.read_states(batch, i, 1)
                self.mark("target forward")
                result = self.train_pack(chunks, one_aux, one_hidden)
            self.stats += result.stats
            loss += result.loss.double()
        if self.sharded is not None:
            self.sharded.collect()
            self.world.all_reduce(loss)
            self.log_loss += loss / self.world.size
        else:
            self.log_loss += self.world.mean_gradients(self.parameters, loss, batch.weight if batch.rows else 0.0)
        norm = full(torch.nn.utils.clip_grad_norm_(self.parameters, self.config.grad_clip))
        self.optimizer.step(lr)
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.step)
        self.copy.refresh()
        self.mark("optimizer")
        self.log_steps += 1
        self.log_tokens += batch.tokens
        return norm

    def states_name(self) -> str:
        """Where the target's states come from, as far as it changes what is learned."""
        if self.stored is None:
            return "online"
        return f"cached {self.stored.plan.dtype}, computed in {self.stored.plan.computed_in}"

    def read_states(self, batch: StepBatch, first: int, count: int) -> tuple[Tensor, Tensor]:
        """Auxiliary states [count N, 3H] and hidden states [count N, H] of some packs of a batch on the device."""
        n = self.config.pack_length
        start, end = first * n, (first + count) * n
        if self.stored is not None:
            return self.stored.read(batch.placed, start, end, self.dtype, self.target.dtype, self.device)
        groups = batch.groups
        if count < len(batch.packs):
            groups = [part for group in groups if (part := group.within(start, end)) is not None]
        ids = self.drafter.config.aux_hidden_state_layer_ids
        remedy = "lower --pack-length, or read --hidden-states that `peagle data hidden-states` wrote"
        with fits(f"pack_length: the target's pass over documents of up to {n} tokens", remedy):
            return encode_packs(self.target, groups, end - start, ids, self.dtype)

    def train_pack(self, chunks: list[Chunk], aux: Tensor, hidden: Tensor) -> PassResult:
        drafter = self.copy.compute

        def chunk_loss(normed: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
            self.mark("drafter forward")
            result = head_loss(normed, drafter.lm_head_weight(), chunk.loss, hidden, self.target.lm_logits, self.loss)
            self.mark("loss slices")
            return result.loss, result.stats

        what = f"chunk_size: a chunk of {self.chunk_size} anchors with {self.loss_rows} rows a loss slice"
        with fits(what, "lower --chunk-size first, then --loss-rows"):
            result = train_pack(drafter, chunks, aux, chunk_loss, self.backend)
        self.mark("drafter backward")  # and the later chunks' forward, where a pack has several
        return result

    def prove_attention(self) -> None:
        """Run the first pack before the run, so that everything is compiled; go without what fails."""
        if self.backend != "flex":
            return
        epoch, at = self.schedule.locate(self.step)
        chunks = (
            replace(self.maker, rank=0, world=1)
            .make(self.step, self.schedule.epoch(epoch)[at][:1], stream=1)
            .to(self.device)
            .packs[0]
        )
        n, width = self.config.pack_length, self.target.hidden_size
        aux = torch.zeros(n, self.drafter.config.aux_size, dtype=self.dtype, device=self.device)
        hidden = torch.zeros(n, width, dtype=self.target.dtype, device=self.device)
        try:
            self.train_pack(chunks, aux, hidden)
        except (torch.OutOfMemoryError, InputError):
            raise
        except Exception as error:  # whatever the compiler stack raises
            if self.fused:
                warnings.warn(f"a compiled layer failed, trying uncompiled ones (slower): {error}", stacklevel=2)
                self.fused = False
                unfuse(self.copy.compute)
                self.prove_attention()
                return
            if self.config.attention == "flex":
                raise
            warnings.warn(f"FlexAttention failed, dense attention takes its place (slower): {error}", stacklevel=2)
            self.backend = "dense"
            self._choose_sizes({})
            self.maker = self._batch_maker()
            self.validation = self._validation_batches()
        finally:
            if self.sharded is not None:
                self.sharded.forget()
            for module in (self.drafter, self.copy.compute):
                module.zero_grad(set_to_none=True)

    def _log(self, log: MetricsLog | None, lr: float, norm: Tensor) -> dict[str, Any]:
        """Write what happened since the last log; the one place in the loop that waits for the device."""
        self._collect_stats()
        loss = float(self.log_loss) / max(self.log_steps, 1)
        sums, matches, counts = self.stats.tolist()
        if not math.isfinite(loss):
            raise InputError(f"lr: the loss is {loss} at step {self.step}, training diverged; lower it (got {lr:g})")
        now = time.monotonic()
        seconds = max(now - self.log_began, 1e-9)
        values: dict[str, Any] = {
            "step": self.step,
            "loss": loss,
            "accuracy": [m / c if c else None for m, c in zip(matches, counts, strict=True)],
            "depth_loss": [s / c if c else None for s, c in zip(sums, counts, strict=True)],
            "rows": int(sum(counts)),
            "lr": lr,
            "grad_norm": float(norm),
            "epoch": self.schedule_epoch(),
            "documents": self.documents,
            "tokens": self.tokens,
            "tokens_per_second": self.log_tokens / seconds,
            "elapsed": self._elapsed(),
        }
        if self.device.type == "cuda":
            values["peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        if log is not None:
            log.write(values)
        self.stats.zero_()
        self.log_loss.zero_()
        self.log_steps = self.log_tokens = 0
        self.log_began = now
        return values

    def schedule_epoch(self) -> float:
        """Passes over the data so far."""
        return self.documents / max(len(self.schedule.documents), 1)

    @contextmanager
    def written_weights(self) -> Iterator[None]:
        """The weights that a head is written with: the moving average where there is one."""
        if self.average is None:
            yield
            return
        with self.average.in_place():
            self.copy.refresh()
            yield
        self.copy.refresh()

    def write_head(self, folder: Path) -> None:
        """Write the head as it is now (every process calls this, the first one writes)."""
        with self.written_weights():
            drafter = self.drafter
            if self.sharded is not None:
                drafter = self.sharded.whole()
                drafter.bind(self.target.embed_weight, self.target.lm_head_weight)
            if self.world.first:
                save_drafter(drafter, folder, target_name=self.target.name_or_path)

    def _validate(self, log: MetricsLog | None) -> None:
        paused = time.monotonic()
        with self.written_weights():
            found = validate(
                self.copy.compute,
                self.target,
                self.validation,
                lambda batch: self.read_states(batch, 0, 1),
                self.config.pack_length,
                self.loss,
                self.backend,
                self.world,
            )
        self.last_validation, self.validated_at = found, self.step
        better = found.without_loops > self.best
        self.best = max(self.best, found.without_loops)
        if better:
            self.write_head(self.folder / "best")
        if log is None:
            return
        log.write(
            {
                "step": self.step,
                "validation_loss": found.loss,
                "validation_accuracy": found.accuracy,
                "validation_acceptance_length": found.acceptance_length,
                "validation_acceptance_length_without_loops": found.without_loops,
                "validation_loop_share": found.loop_share,
                "validation_joint_without_loops": list(found.joint),
            }
        )
        shown = " ".join("-" if a is None else f"{a:.3f}" for a in found.accuracy)
        tqdm.write(
            f"step {self.step}: validation loss {found.loss:.4f}, acceptance length {found.acceptance_length:.3f} "
            f"({found.without_loops:.3f} without the {found.loop_share:.0%} in repeating text), "
            f"top-1 by depth {shown}",
            file=sys.stderr,
        )
        self.log_began += time.monotonic() - paused  # tokens/s counts training only

    def _facts(self) -> dict[str, Any]:
        import transformers

        facts: dict[str, Any] = {
            "config": self.config.to_dict(),
            "drafter": self.drafter.config.to_dict(),
            "sizes": {"chunk_size": self.chunk_size, "loss_rows": self.loss_rows},
            "total_steps": self.total_steps,
            "data": self.fingerprint,
            "states": self.states_name(),
            "target": {"name": self.target.name_or_path, "fingerprint": target_identity(self.target)},
            "versions": {
                "peagle": getattr(peagle, "__version__", None),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "device": torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.machine(),
            "threads": torch.get_num_threads(),
            "processes": self.world.size,
        }
        return facts
