"""Target states kept on the device after their first use: from the second epoch on the target does not run for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.training.memory import fits


@dataclass(frozen=True)
class Placed:
    """A document in a step's packs laid end to end: tokens [start, start + length)."""

    document: int
    start: int
    length: int


class StateCache:
    """Auxiliary states [n, 3H] and LM-head inputs [n, H] of documents, up to `room` bytes; first come, first kept.

    A bf16 token of a target with hidden size H takes 8H bytes: 4.6 KB for SmolLM2-135M, 33 KB for an 8B model. The
    memory is taken at once, when the first states come, for as many as `tokens` (all there will be): nothing grows
    while a run goes on.
    """

    def __init__(self, room: int, tokens: int) -> None:
        self.room, self.tokens = room, tokens
        self.starts: dict[int, int] = {}  # row of each kept document's first token
        self.used = 1  # row 0 is what padding reads: zeros
        self.rows: tuple[Tensor, Tensor] | None = None

    def get(self, placed: Sequence[Placed], positions: int) -> tuple[Tensor, Tensor] | None:
        """States [positions, ..] of packs laid end to end, zeros elsewhere; None when no document is kept."""
        kept = [item for item in placed if item.document in self.starts]
        if self.rows is None or not kept:
            return None
        index = np.zeros(positions, dtype=np.int64)
        for item in kept:
            first = self.starts[item.document]
            index[item.start : item.start + item.length] = np.arange(first, first + item.length)
        aux, hidden = self.rows
        where = torch.from_numpy(index)
        if aux.is_cuda:
            where = where.pin_memory().to(aux.device, non_blocking=True)
        return aux[where], hidden[where]

    def missing(self, placed: Sequence[Placed]) -> list[Placed]:
        """Those that are not kept, in their order."""
        return [item for item in placed if item.document not in self.starts]

    def put(self, placed: Sequence[Placed], aux: Tensor, hidden: Tensor) -> None:
        """Keep what there is room for, of documents not kept yet."""
        if self.rows is None:
            if not self.room or not placed:
                return
            each = aux.shape[1] * aux.element_size() + hidden.shape[1] * hidden.element_size()
            count = 1 + min(self.tokens, self.room // each)
            with fits(f"the state cache of {count:,} tokens", "lower --state-cache-gib"):
                self.rows = aux.new_empty(count, aux.shape[1]), hidden.new_empty(count, hidden.shape[1])
            for rows in self.rows:
                rows[0] = 0
        for item in placed:
            end = self.used + item.length
            if item.document in self.starts or end > len(self.rows[0]):
                continue
            for rows, states in zip(self.rows, (aux, hidden), strict=True):
                rows[self.used : end] = states[item.start : item.start + item.length]
            self.starts[item.document], self.used = self.used, end
