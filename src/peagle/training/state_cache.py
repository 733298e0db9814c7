"""Target states kept on the device after their first use: from the second epoch on the target is not run again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Placed:
    """A document in a step's packs laid end to end: tokens [start, start + length)."""

    document: int
    start: int
    length: int


class StateCache:
    """Auxiliary states [n, 3H] and LM-head inputs [n, H] of documents, up to `room` bytes; first come, first kept.

    A bf16 token of a target with hidden size H takes 8H bytes: 4.6 KB for SmolLM2-135M, 33 KB for an 8B model.
    """

    def __init__(self, room: int) -> None:
        self.room = room
        self.states: dict[int, tuple[Tensor, Tensor]] = {}

    def get(self, placed: Sequence[Placed], positions: int) -> tuple[Tensor, Tensor] | None:
        """States [positions, ..] of packs laid end to end, zeros in padding; None unless every document is kept."""
        if not placed or any(item.document not in self.states for item in placed):
            return None
        parts: tuple[list[Tensor], list[Tensor]] = ([], [])
        at = 0
        for item in [*sorted(placed, key=lambda item: item.start), Placed(-1, positions, 0)]:
            for kept, found in zip(parts, self.states[placed[0].document], strict=True):
                if item.start > at:
                    kept.append(found.new_zeros(item.start - at, found.shape[1]))
            if item.length:
                for kept, found in zip(parts, self.states[item.document], strict=True):
                    kept.append(found[: item.length])
            at = item.start + item.length
        aux, hidden = (torch.cat(kept) for kept in parts)
        return aux, hidden

    def put(self, placed: Sequence[Placed], aux: Tensor, hidden: Tensor) -> None:
        """Keep what there is room for, of documents not kept yet."""
        for item in placed:
            span = slice(item.start, item.start + item.length)
            size = item.length * (aux.shape[1] * aux.element_size() + hidden.shape[1] * hidden.element_size())
            if item.document in self.states or size > self.room:
                continue
            self.room -= size
            self.states[item.document] = (aux[span].clone(), hidden[span].clone())
