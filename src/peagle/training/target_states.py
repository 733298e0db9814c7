"""The target's states for a step: from the target itself, from files, or kept on the device since an epoch before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle.target.model import Target
from peagle.training.batches import StepBatch
from peagle.training.encode import encode_packs
from peagle.training.memory import fits
from peagle.training.read_ahead import ReadAhead, ahead_bytes
from peagle.training.state_cache import Placed, StateCache
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

    @property
    def read_ahead(self) -> ReadAhead | None:
        """A new reader of stored states for another thread; None where they are not stored."""
        if self.stored is None:
            return None
        pinned = self.target.device.type == "cuda"
        return ReadAhead(self.stored.document, self.cache.starts, ahead_bytes(), pinned)

    def read(self, batch: StepBatch, first: int, count: int) -> tuple[Tensor, Tensor]:
        """States of `count` packs of a batch on the device, from pack `first` on, laid end to end."""
        return self._read(batch, self._placed(batch, first, count), first, count)

    def read_all(self, batch: StepBatch) -> tuple[Tensor, Tensor] | None:
        """`read_kept` of all packs; None when they are too large to be held at once, or there are none."""
        if not batch.packs or self._bytes(batch) > ENCODE_BYTES:
            return None
        return self.read_kept(batch, 0, len(batch.packs))

    def read_kept(self, batch: StepBatch, first: int, count: int) -> tuple[Tensor, Tensor]:
        """What `read` gives, of each document kept for the next epoch where there is room."""
        placed = self._placed(batch, first, count)
        states, missing = self.cache.get(placed, count * self.pack_length), self.cache.missing(placed)
        if states is None or missing:
            states = self._read(batch, missing, first, count, states)
            self.cache.put(missing, *states)
        return states

    def _placed(self, batch: StepBatch, first: int, count: int) -> list[Placed]:
        """The documents of some packs, their places counted from the first pack's."""
        start, end = first * self.pack_length, (first + count) * self.pack_length
        return [replace(item, start=item.start - start) for item in batch.placed if start <= item.start < end]

    def _read(
        self,
        batch: StepBatch,
        placed: Sequence[Placed],
        first: int,
        count: int,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States of those documents of some packs, beside those that are there."""
        n, target = self.pack_length, self.target
        if self.stored is not None:
            take = None if batch.ahead is None else batch.ahead.take
            return self.stored.read(placed, count * n, self.dtype, target.dtype, target.device, take, into)
        starts = {first * n + item.start for item in placed}
        groups = [part for group in batch.groups if (part := group.only(starts, first * n)) is not None]
        remedy = "lower --pack-length, or read --hidden-states that `peagle data hidden-states` wrote"
        with fits(f"pack_length: the target's pass over documents of up to {n} tokens", remedy):
            return encode_packs(target, groups, count * n, self.aux_layer_ids, self.dtype, into)

    def _bytes(self, batch: StepBatch) -> int:
        """Of the states of all packs."""
        token = self.aux_size * self.dtype.itemsize + self.target.hidden_size * self.target.dtype.itemsize
        return len(batch.packs) * self.pack_length * token
