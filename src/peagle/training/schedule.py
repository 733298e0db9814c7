"""Which documents train together at which step: packing (best fit, longest first) and the steps of an epoch.

A step's packs depend on (seed, epoch, position in the epoch) alone, so a run resumes from its step number.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np

WINDOW = 1024  # documents packed together; larger packs tighter, smaller mixes better


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
