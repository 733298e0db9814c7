"""The target's states for a step: from the target itself, from files, or kept on the device since an epoch before."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.engine.memory import host_memory
from peagle.target.model import Target
from peagle.training.batches import StepBatch
from peagle.training.encode import encode_packs
from peagle.training.memory import fits
from peagle.training.state_cache import StateCache
from peagle.training.states import StoredStates

FALLBACK_HOST = 16 << 30  # where the system does not say
ENCODE_BYTES = 2 << 30  # auxiliary and hidden states of the packs that are encoded together
AHEAD_SHARE = 16  # of the host's free memory, for a step's stored states; up to four steps wait there


def ahead_bytes() -> int:
    """Most bytes of a step's stored states that a process reads ahead: all of a machine's take a quarter of its free
    memory together. A pack of 131,072 tokens of a target with hidden size 4,096 is 4 GiB."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return (host_memory() or FALLBACK_HOST) // AHEAD_SHARE // processes


def states_name(stored: StoredStates | None) -> str:
    """Where the target's states come from, as far as it changes what is learned."""
    return "online" if stored is None else f"cached {stored.plan.dtype}, computed in {stored.plan.computed_in}"


@dataclass(frozen=True)
class TargetStates:
    """Reads auxiliary states [T, 3H] in `dtype` and hidden states [T, H] in the target's, on its device."""

    target: Target
    stored: StoredStates | None
    cache: StateCache
    aux_layer_ids: tuple[int, ...]
    pack_length: int
    dtype: torch.dtype

    @property
    def aux_size(self) -> int:
        return len(self.aux_layer_ids) * self.target.hidden_size

    def read(self, batch: StepBatch, first: int, count: int) -> tuple[Tensor, Tensor]:
        """States of `count` packs of a batch on the device, from pack `first` on, laid end to end."""
        n, target = self.pack_length, self.target
        start, end = first * n, (first + count) * n
        if self.stored is not None:
            return self.stored.read(batch.placed, start, end, self.dtype, target.dtype, target.device, batch.stored)
        groups = batch.groups
        if count < len(batch.packs):
            groups = [part for group in groups if (part := group.within(start, end)) is not None]
        remedy = "lower --pack-length, or read --hidden-states that `peagle data hidden-states` wrote"
        with fits(f"pack_length: the target's pass over documents of up to {n} tokens", remedy):
            return encode_packs(target, groups, end - start, self.aux_layer_ids, self.dtype)

    def read_ahead(self, batch: StepBatch) -> StepBatch:
        """The batch with the stored states of its documents on the host, for another thread to make; as it is where
        they are not stored or too large to be held several steps ahead."""
        if self.stored is None or self._bytes(batch) > ahead_bytes():
            return batch
        wanted = [item for item in batch.placed if item.document not in self.cache.starts]
        return replace(batch, stored={i.document: self.stored.document(i.document, i.length) for i in wanted})

    def read_all(self, batch: StepBatch) -> tuple[Tensor, Tensor] | None:
        """`read_kept` of all packs; None when they are too large to be held at once, or there are none."""
        if not batch.packs or self._bytes(batch) > ENCODE_BYTES:
            return None
        return self.read_kept(batch, 0, len(batch.packs))

    def read_kept(self, batch: StepBatch, first: int, count: int) -> tuple[Tensor, Tensor]:
        """What `read` gives, kept for the next epoch where there is room."""
        start, end = first * self.pack_length, (first + count) * self.pack_length
        placed = [replace(item, start=item.start - start) for item in batch.placed if start <= item.start < end]
        states = self.cache.get(placed, end - start)
        if states is None:
            states = self.read(batch, first, count)
            self.cache.put(placed, *states)
        return states

    def _bytes(self, batch: StepBatch) -> int:
        """Of the states of all packs."""
        token = self.aux_size * self.dtype.itemsize + self.target.hidden_size * self.target.dtype.itemsize
        return len(batch.packs) * self.pack_length * token
