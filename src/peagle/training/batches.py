"""From answers to packs: which documents train together at which step, and their rows, made ready ahead of time.

A step's packs depend on (seed, epoch, position in the epoch) alone, so a run resumes from its step number.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_left, insort
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from peagle.errors import InputError
from peagle.training.chunks import Chunk, make_chunk, pin, round_up, scale_weights, to_device
from peagle.training.loops import repeating
from peagle.training.rows import build_rows
from peagle.training.state_cache import Placed

WINDOW = 1024  # documents packed together; larger packs tighter, smaller mixes better


class Example(Protocol):
    @property
    def input_ids(self) -> np.ndarray: ...
    @property
    def answer_mask(self) -> np.ndarray: ...


class Answers(Protocol):
    """What training needs of a data set (`peagle.data.dataset.AnswerDataset`)."""

    fingerprint: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...
    def token_counts(self, vocab_size: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Scan:
    """What one look at every document found."""

    documents: np.ndarray  # indices that can train
    lengths: np.ndarray  # their lengths after truncation
    seen: np.ndarray  # [V] bool: token ids that occur anywhere, prompts included
    truncated: int
    skipped_short: int
    skipped_unsupervised: int

    def summary(self) -> str:
        return (
            f"{len(self.documents)} documents, {int(self.lengths.sum())} tokens; {self.truncated} truncated, "
            f"skipped: {self.skipped_short} shorter than 2 tokens, {self.skipped_unsupervised} without an answer token "
            "to predict"
        )


def scan_answers(answers: Answers, pack_length: int, vocab_size: int) -> Scan:
    """Look at every document once. Raises InputError for ids outside the vocabulary or when nothing can train."""
    documents, lengths = [], []
    seen = np.zeros(vocab_size, dtype=bool)
    truncated = short = unsupervised = 0
    for i in range(len(answers)):
        example = answers[i]
        ids = example.input_ids
        if len(ids) and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
            raise InputError(f"data: document {i} holds token id {int(ids.max())}, expected 0 to {vocab_size - 1}")
        seen[ids] = True
        if len(ids) < 2:
            short += 1
        elif not example.answer_mask[2:pack_length].any():
            unsupervised += 1
        else:
            truncated += len(ids) > pack_length
            documents.append(i)
            lengths.append(min(len(ids), pack_length))
    if not documents:
        raise InputError(f"data: none of {len(answers)} documents has an answer token to learn from")
    return Scan(np.array(documents), np.array(lengths), seen, truncated, short, unsupervised)


def split_validation(scan: Scan, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices into `scan.documents`: (train, validation); `count` documents, at most a tenth, validate."""
    order = np.random.default_rng([seed, 7]).permutation(len(scan.documents))
    held = min(count, len(order) // 10)
    return np.sort(order[held:]), np.sort(order[:held])


def pack_documents(lengths: np.ndarray, pack_length: int, seed: Sequence[int]) -> list[list[int]]:
    """Shuffle documents and fill packs of `pack_length` tokens (best fit, longest first, within a window)."""
    rng = np.random.default_rng(list(seed))
    order = rng.permutation(len(lengths))
    packs: list[list[int]] = []
    for begin in range(0, len(order), WINDOW):
        window = order[begin : begin + WINDOW]
        window = window[np.argsort(-lengths[window], kind="stable")]
        rooms: list[tuple[int, int]] = []  # (room left, pack), sorted
        for document in window:
            length = int(lengths[document])
            at = bisect_left(rooms, (length, -1))
            if at == len(rooms):
                packs.append([int(document)])
                room, pack = pack_length, len(packs) - 1
            else:
                room, pack = rooms.pop(at)
                packs[pack].append(int(document))
            insort(rooms, (room - length, pack))
    return [packs[i] for i in rng.permutation(len(packs))]


class Schedule:
    """The packs of every step, epoch after epoch."""

    def __init__(self, documents: np.ndarray, lengths: np.ndarray, pack_length: int, packs_per_step: int, seed: int):
        self.documents, self.lengths = documents, lengths
        self.pack_length, self.packs_per_step, self.seed = pack_length, packs_per_step, seed
        self._epochs: dict[int, list[list[list[int]]]] = {}

    def epoch(self, epoch: int) -> list[list[list[int]]]:
        """Steps of an epoch, each a list of packs, each a list of document indices of the data set."""
        if epoch not in self._epochs:
            packs = pack_documents(self.lengths, self.pack_length, (self.seed, epoch))
            named = [[int(self.documents[i]) for i in pack] for pack in packs]
            size = self.packs_per_step
            self._epochs = {epoch: [named[i : i + size] for i in range(0, len(named), size)]}  # keep one
        return self._epochs[epoch]

    def locate(self, step: int) -> tuple[int, int]:
        """Step number -> (epoch, step in the epoch)."""
        epoch = 0
        while step >= len(self.epoch(epoch)):
            step -= len(self.epoch(epoch))
            epoch += 1
        return epoch, step

    def steps_for(self, steps: int | None, epochs: int | None, samples: int | None) -> int | None:
        """The smallest of `steps` and what `epochs` passes or `samples` documents take; None when none is given."""
        if epochs is None and samples is None:
            return steps
        count = taken = epoch = 0
        while epochs is None or epoch < epochs:
            for step in self.epoch(epoch):
                if (samples is not None and taken >= samples) or count == steps:
                    return count
                taken += sum(len(pack) for pack in step)
                count += 1
            epoch += 1
        return count


@dataclass(frozen=True)
class EncodeGroup:
    """Documents that the target reads in one call: ids [B, L] right-padded; their tokens' places."""

    ids: Tensor
    source: Tensor  # [S] positions in the flattened ids
    place: Tensor  # [S] positions in the step's packs laid end to end
    row_starts: tuple[int, ...]  # place of each document's first token

    def within(self, start: int, end: int) -> EncodeGroup | None:
        """The documents that lie in [start, end), their places counted from `start`; None when there are none."""
        rows = [i for i, at in enumerate(self.row_starts) if start <= at < end]
        if not rows:
            return None
        width = self.ids.shape[1]
        chosen = (self.place >= start) & (self.place < end)
        source = self.source[chosen]
        renumber = torch.full((len(self.row_starts),), -1, dtype=torch.int64)
        renumber[rows] = torch.arange(len(rows))
        renumber = renumber.to(source.device)
        return EncodeGroup(
            self.ids[rows],
            renumber[source // width] * width + source % width,
            self.place[chosen] - start,
            tuple(self.row_starts[i] - start for i in rows),
        )


@dataclass(frozen=True)
class StepBatch:
    """One optimizer step: packs of chunks, and what the target must read for them."""

    step: int
    packs: list[list[Chunk]]
    groups: list[EncodeGroup]
    placed: tuple[Placed, ...]  # this process's documents in the packs
    documents: int
    tokens: int
    rows: int  # supervised rows
    weight: float  # sum of their weights, by which they are divided
    repeating: Tensor | None = None  # [packs, N] bool: tokens in exactly repeating text, for validation

    def pin(self) -> StepBatch:
        groups = [
            replace(g, ids=g.ids.pin_memory(), source=g.source.pin_memory(), place=g.place.pin_memory())
            for g in self.groups
        ]
        return replace(self, packs=[[pin(c) for c in p] for p in self.packs], groups=groups)

    def to(self, device: torch.device) -> StepBatch:
        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        groups = [replace(g, ids=move(g.ids), source=move(g.source), place=move(g.place)) for g in self.groups]
        packs = [[to_device(c, device) for c in pack] for pack in self.packs]
        loops = None if self.repeating is None else move(self.repeating)
        return replace(self, packs=packs, groups=groups, repeating=loops)


@dataclass(frozen=True)
class BatchMaker:
    """Turns lists of documents into step batches, on the CPU."""

    answers: Answers
    pack_length: int
    chunk_size: int
    depths: int
    keep_rate: float
    mask_token_id: int | None  # None: EAGLE-3, whose later steps read true tokens
    stepwise: bool
    hard: bool
    depth_weights: Tensor | None
    draft_ids: Tensor | None
    row_multiple: int
    slice_rows: int
    loss_multiple: int
    seed: int
    encode_tokens: int  # most padded tokens that the target reads in one call
    encode_overhead: int  # what one more call costs, in tokens
    encode_multiple: int = 1  # padded lengths are multiples of it
    rank: int = 0  # takes the packs rank, rank + world, .. of a step
    world: int = 1

    def make(self, step: int, packs: list[list[int]], stream: int, find_loops: bool = False) -> StepBatch:
        """The batch of a step, or this process's share of it. `stream` (with the seed and the pack) decides the
        sampled chains, so that they do not depend on the number of processes; `documents` and `tokens` count all."""
        n = self.pack_length
        chunks: list[list[Chunk]] = []
        spans: list[tuple[np.ndarray, int]] = []  # (ids, place in the packs laid end to end)
        placed: list[Placed] = []
        tokens_total = 0
        loops = np.zeros((len(packs), n), dtype=bool) if find_loops else None
        for number, documents in enumerate(packs):
            if number % self.world != self.rank:
                tokens_total += sum(min(len(self.answers[document].input_ids), n) for document in documents)
                continue
            place = n * len(chunks)
            tokens, doc_ids = np.zeros(n, dtype=np.int64), np.full(n, -1, dtype=np.int64)
            answers = np.zeros(n, dtype=bool)
            at = 0
            for order, document in enumerate(documents):
                example = self.answers[document]
                ids, mask = example.input_ids[:n], example.answer_mask[:n]
                end = at + len(ids)
                tokens[at:end], answers[at:end], doc_ids[at:end] = ids, mask, order
                spans.append((ids, place + at))
                placed.append(Placed(document, place + at, len(ids)))
                if loops is not None:
                    loops[number, at:end] = repeating(ids)
                at = end
            tokens_total += at
            generator = torch.Generator().manual_seed(_mix(self.seed, stream, step, number))
            token_tensor = torch.from_numpy(tokens)
            table = build_rows(
                token_tensor,
                torch.from_numpy(doc_ids),
                torch.from_numpy(answers),
                self.depths,
                self.keep_rate,
                generator,
                self.mask_token_id,
            )
            chunks.append(
                [
                    make_chunk(
                        table,
                        start,
                        min(start + self.chunk_size, n),
                        stepwise=self.stepwise,
                        depths=self.depths,
                        tokens=token_tensor,
                        draft_ids=self.draft_ids,
                        hard=self.hard,
                        depth_weights=self.depth_weights,
                        row_multiple=self.row_multiple,
                        slice_rows=self.slice_rows,
                        loss_multiple=self.loss_multiple,
                    )
                    for start in range(0, n, self.chunk_size)
                ]
            )
        weight = sum(float(chunk.loss.weight.sum()) for pack in chunks for chunk in pack)
        scaled = [[scale_weights(chunk, 1.0 / max(weight, 1e-9)) for chunk in pack] for pack in chunks]
        return StepBatch(
            step=step,
            packs=scaled,
            groups=self._groups(spans),
            placed=tuple(placed),
            documents=sum(len(pack) for pack in packs),
            tokens=tokens_total,
            rows=sum(chunk.loss.count for pack in scaled for chunk in pack),
            weight=weight,
            repeating=None if loops is None else torch.from_numpy(loops),
        )

    def _groups(self, spans: list[tuple[np.ndarray, int]]) -> list[EncodeGroup]:
        """Group documents of similar length: one more call to the target against the padding it saves."""
        spans = sorted(spans, key=lambda span: -len(span[0]))
        groups: list[EncodeGroup] = []
        if not spans:
            return groups
        current: list[tuple[np.ndarray, int]] = []
        waste = width = 0
        for span in spans:
            loss = width - len(span[0])
            full = (len(current) + 1) * width > self.encode_tokens
            if current and (full or waste + loss > self.encode_overhead):
                groups.append(_encode_group(current, width))
                current, waste = [], 0
            if not current:
                width, loss = round_up(len(span[0]), self.encode_multiple), 0
            current.append(span)
            waste += loss
        groups.append(_encode_group(current, width))
        return groups


def _mix(*numbers: int) -> int:
    return int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _encode_group(spans: list[tuple[np.ndarray, int]], width: int) -> EncodeGroup:
    ids = np.zeros((len(spans), width), dtype=np.int64)
    source, place = [], []
    for row, (tokens, at) in enumerate(spans):
        ids[row, : len(tokens)] = tokens
        source.append(np.arange(row * width, row * width + len(tokens)))
        place.append(np.arange(at, at + len(tokens)))
    return EncodeGroup(
        torch.from_numpy(ids),
        torch.from_numpy(np.concatenate(source)),
        torch.from_numpy(np.concatenate(place)),
        tuple(at for _, at in spans),
    )


def prefetch(
    maker: BatchMaker, schedule: Schedule, first: int, last: int | None, pinned: bool
) -> Generator[StepBatch, None, None]:
    """Batches of the steps first, first + 1, .. (below `last`), made on a background thread, two ahead."""
    ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(maxsize=2)
    stop = threading.Event()

    def put(item: StepBatch | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            epoch, at = schedule.locate(first)
            step = first
            while last is None or step < last:
                steps = schedule.epoch(epoch)
                if at == len(steps):
                    epoch, at = epoch + 1, 0
                    continue
                batch = maker.make(step, steps[at], stream=1)
                if not put(batch.pin() if pinned else batch):
                    return
                step, at = step + 1, at + 1
            put(None)
        except BaseException as error:  # handed to the training thread
            put(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
