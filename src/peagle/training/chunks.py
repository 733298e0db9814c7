"""Rows of a pack laid out for the drafter, one chunk of anchors at a time.

A chunk holds the anchors [start, end) as T rows: its depth-0 rows first, then its chain rows, then filler rows that
round T up so that a GPU sees few different shapes. P-EAGLE's chains lie one after another (the rows of an anchor are
neighbours); EAGLE-3's lie step after step, because a step can only start when the one before it is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from peagle.training.rows import PAD_DEPTH, RowTable


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


@dataclass(frozen=True)
class LossRows:
    """The supervised rows of a chunk, ordered by teacher, padded with rows of weight 0. All [R] but `positions`.

    Rows of several depths share a teacher (4.2 at K = 8, r = 0.8): its logits are made once for each of `positions`.
    """

    index: Tensor  # row of the chunk
    teacher: Tensor  # index into `positions`, ascending
    positions: Tensor  # [P] positions in the pack of the target's hidden states, ascending
    token: Tensor  # the actual token, in the draft vocabulary (-1 where it is outside)
    depth: Tensor
    weight: Tensor  # float64; already divided by the whole batch's sum of weights
    anchor: Tensor
    count: int  # rows before the padding
    slices: tuple[tuple[int, int, int, int], ...]  # (first row, end, first of `positions`, end): logits at a time


@dataclass(frozen=True)
class Chunk:
    """One chunk of a pack, ready for the drafter; index tensors are [T] int64."""

    start: int
    end: int
    token: Tensor
    position: Tensor
    anchor: Tensor
    first: Tensor
    depth: Tensor  # PAD_DEPTH for fillers
    step_source: Tensor  # [M]: depth-0 row of each chain (EAGLE-3's first feedback); empty for P-EAGLE
    chain_stride: int  # rows between two depths of one chain
    steps: int  # passes after depth 0: 0 for P-EAGLE, whose chains run in the same pass
    loss: LossRows

    @property
    def num_anchors(self) -> int:
        return self.end - self.start

    @property
    def num_rows(self) -> int:
        return int(self.token.shape[0])


def map_tensors(item: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a Chunk (or LossRows) with the function applied to every tensor."""
    changed: dict[str, Any] = {}
    for f in fields(item):
        value = getattr(item, f.name)
        if isinstance(value, Tensor):
            changed[f.name] = function(value)
        elif isinstance(value, LossRows):
            changed[f.name] = map_tensors(value, function)
    return replace(item, **changed)


def to_device(chunk: Chunk, device: torch.device) -> Chunk:
    """A copy on the device, asynchronously where the chunk is pinned."""
    return map_tensors(chunk, lambda tensor: tensor.to(device, non_blocking=True))


def pin(chunk: Chunk) -> Chunk:
    """A copy in pinned memory."""
    return map_tensors(chunk, lambda tensor: tensor.pin_memory() if tensor.numel() else tensor)


def make_chunk(
    table: RowTable,
    start: int,
    end: int,
    *,
    stepwise: bool,
    depths: int,
    tokens: Tensor,
    draft_ids: Tensor | None = None,
    hard: bool = False,
    depth_weights: Tensor | None = None,
    row_multiple: int = 1,
    slice_rows: int = 512,
    loss_multiple: int = 1,
) -> Chunk:
    """Lay out the anchors [start, end) of a table.

    stepwise: EAGLE-3's order (and passes) instead of P-EAGLE's. tokens [N]: the pack. draft_ids [V]: target id ->
    draft id, -1 outside the draft vocabulary (None: the whole vocabulary). hard: leave out rows whose token is outside.
    depth_weights [depths]: weight of a row by its depth (None: 1). Chain rows (for EAGLE-3 those of one step) are
    rounded up to `row_multiple`; the loss takes at most `slice_rows` supervised rows at a time, in slices of a multiple
    of `loss_multiple`. Weights are not normalised yet (`scale_weights`).
    """
    n = end - start
    lo, hi = table.num_anchors + int(table.chain_offsets[start]), table.num_anchors + int(table.chain_offsets[end])
    rows = torch.cat((torch.arange(start, end), torch.arange(lo, hi)))
    chain_length = table.chain_offsets[start + 1 : end + 1] - table.chain_offsets[start:end]
    if stepwise:
        chains = (chain_length > 0).nonzero()[:, 0]
        width = round_up(max(len(chains), 1), row_multiple)
        rank = (chain_length > 0).to(torch.int64).cumsum(0) - 1
        slots = (table.depth[lo:hi] - 1) * width + rank[table.anchor[lo:hi] - start]
        steps = depths - 1
        size = n + steps * width
        source = torch.zeros(width, dtype=torch.int64)
        source[: len(chains)] = chains
        stride = width
    else:
        slots = torch.arange(hi - lo)
        steps, stride = 0, 1
        # the sum is what must be round: depth-0 rows need not be
        size = round_up(round_up(hi - lo, row_multiple) + n, min(row_multiple, 128))
        source = torch.zeros(0, dtype=torch.int64)
    place = torch.cat((torch.arange(n), n + slots))

    def spread(values: Tensor, filler: int) -> Tensor:
        out = torch.full((size,), filler, dtype=torch.int64)
        out[place] = values[rows]
        return out

    chosen = table.supervised[rows]
    actual = tokens[table.predicted[rows]]
    if draft_ids is not None:
        actual = draft_ids[actual]
        if hard:
            chosen = chosen & (actual >= 0)
    picked = chosen.nonzero()[:, 0]
    depth = table.depth[rows][picked]
    weight = torch.ones(len(picked), dtype=torch.float64) if depth_weights is None else depth_weights.double()[depth]

    return Chunk(
        start=start,
        end=end,
        token=spread(table.token, 0),
        position=spread(table.position, 0),
        anchor=spread(table.anchor, start),
        first=spread(table.first, start),
        depth=spread(table.depth, PAD_DEPTH),
        step_source=source,
        chain_stride=stride,
        steps=steps,
        loss=make_loss_rows(
            place[picked],
            table.teacher[rows][picked],
            actual[picked],
            depth,
            weight,
            table.anchor[rows][picked],
            slice_rows,
            loss_multiple,
        ),
    )


def make_loss_rows(
    index: Tensor,
    position: Tensor,
    token: Tensor,
    depth: Tensor,
    weight: Tensor,
    anchor: Tensor,
    slice_rows: int,
    multiple: int = 1,
) -> LossRows:
    """Order supervised rows by the position [R] of their teacher and cut them into equal slices of at most about
    `slice_rows` rows, each but the last a multiple of `multiple`; padding fills the last one up to it."""
    order = position.argsort(stable=True)
    positions, teacher = position[order].unique_consecutive(return_inverse=True)
    count = len(order)
    total = round_up(count, multiple)
    size = round_up(-(-total // max(-(-total // slice_rows), 1)), multiple)
    # padding repeats the last teacher, so that the order holds
    teacher = torch.cat((teacher, teacher[-1:].expand(total - count)))
    slices = []
    for lo in range(0, total, max(size, 1)):
        hi = min(lo + size, total)
        slices.append((lo, hi, int(teacher[lo]), int(teacher[hi - 1]) + 1))

    def padded(values: Tensor) -> Tensor:
        values = values[order]
        return torch.cat((values, values.new_zeros(total - count)))

    return LossRows(
        index=padded(index),
        teacher=teacher,
        positions=positions,
        token=padded(token),
        depth=padded(depth),
        weight=padded(weight),
        anchor=padded(anchor),
        count=count,
        slices=tuple(slices),
    )


def scale_weights(chunk: Chunk, factor: float) -> Chunk:
    """A copy whose row weights are multiplied by `factor` (1 / the whole batch's sum of weights)."""
    return replace(chunk, loss=replace(chunk.loss, weight=chunk.loss.weight * factor))
