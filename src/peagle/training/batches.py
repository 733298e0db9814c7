"""From packs of documents to what one optimizer step trains on: their rows, laid out in chunks on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peagle.training.chunks import Chunk, make_chunk, pin, scale_weights, to_device
from peagle.training.encode_groups import EncodeGroup, group_spans
from peagle.training.loops import repeating
from peagle.training.read_ahead import ReadAhead
from peagle.training.rows import build_rows
from peagle.training.scan import Answers
from peagle.training.state_cache import Placed


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
    ahead: ReadAhead | None = None  # reads its documents' stored states before their turn

    def pin(self) -> StepBatch:
        groups = [
            replace(g, ids=g.ids.pin_memory(), source=g.source.pin_memory(), place=g.place.pin_memory())
            for g in self.groups
        ]
        return replace(self, packs=[[pin(c) for c in p] for p in self.packs], groups=groups)

    def to(self, device: torch.device) -> StepBatch:
        groups = [group.to(device) for group in self.groups]
        packs = [[to_device(c, device) for c in pack] for pack in self.packs]
        loops = None if self.repeating is None else self.repeating.to(device, non_blocking=True)
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
    encode_tokens: int  # most padded tokens that the target reads in one call; 0: each document in one of its own
    encode_overhead: int  # what one more call costs, in tokens
    encode_multiple: int = 1  # padded lengths are multiples of it
    stored: bool = False  # states are read from files: the target is given nothing to read
    lengths: np.ndarray | None = None  # by document, after truncation; None: the answers are opened for them
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
                tokens_total += sum(self._length(document) for document in documents)
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
        groups: list[EncodeGroup] = []
        if not self.stored:
            groups = group_spans(spans, self.encode_tokens, self.encode_overhead, self.encode_multiple)
        scaled = [[scale_weights(chunk, 1.0 / max(weight, 1e-9)) for chunk in pack] for pack in chunks]
        return StepBatch(
            step=step,
            packs=scaled,
            groups=groups,
            placed=tuple(placed),
            documents=sum(len(pack) for pack in packs),
            tokens=tokens_total,
            rows=sum(chunk.loss.count for pack in scaled for chunk in pack),
            weight=weight,
            repeating=None if loops is None else torch.from_numpy(loops),
        )

    def _length(self, document: int) -> int:
        if self.lengths is not None:  # another process's document: opening it would decode a shard for one number
            return int(self.lengths[document])
        return min(len(self.answers[document].input_ids), self.pack_length)


def _mix(*numbers: int) -> int:
    return int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0] >> np.uint64(1))
