"""The target's states for a step: from the target itself, from files, or kept on the device since an epoch before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.target.model import Target
from peagle.training.batches import StepBatch
from peagle.training.encode import encode_packs
from peagle.training.memory import fits
from peagle.training.state_cache import StateCache
from peagle.training.states import StoredStates

ENCODE_BYTES = 2 << 30  # auxiliary and hidden states of the packs that are encoded together


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
            return self.stored.read(batch.placed, start, end, self.dtype, target.dtype, target.device)
        groups = batch.groups
        if count < len(batch.packs):
            groups = [part for group in groups if (part := group.within(start, end)) is not None]
        remedy = "lower --pack-length, or read --hidden-states that `peagle data hidden-states` wrote"
        with fits(f"pack_length: the target's pass over documents of up to {n} tokens", remedy):
            return encode_packs(target, groups, end - start, self.aux_layer_ids, self.dtype)

    def read_all(self, batch: StepBatch) -> tuple[Tensor, Tensor] | None:
        """States of all packs, which are kept for the next epoch where there is room; None when they are too large to
        be held at once, or there are none."""
        count = len(batch.packs)
        token_bytes = self.aux_size * self.dtype.itemsize + self.target.hidden_size * self.target.dtype.itemsize
        if not count or count * self.pack_length * token_bytes > ENCODE_BYTES:
            return None
        states = self.cache.get(batch.placed, count * self.pack_length)
        if states is None:
            states = self.read(batch, 0, count)
            self.cache.put(batch.placed, *states)
        return states
