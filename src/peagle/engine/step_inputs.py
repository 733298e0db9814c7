"""From a plan to the tensors of one step: all of it computed in NumPy and moved to the device in one copy a type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.lanes import Lanes
from peagle.engine.plan import StepPlan
from peagle.engine.sampler import SamplingRows
from peagle.target.paged_attention import PagedBatch

Ints = NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """T rows of R requests, N of them with logits; K is the engine's number of drafts.

    token_index [T]: where each row's token is in the flat token buffer. logit_rows [N]. choice_index [R, K+1]: which
    logits row chooses the token after the request's j-th verified row (repeating its last). draft_rows [R, K]: the row
    whose token is the j-th draft. lane_offset [R]: start of the lane in the flat token buffer. ends [R]: position
    behind the last row. num_drafts, samples [R] as in the plan, max_drafts, max_total [R] as in Lanes. sampling: the
    rows that do not take the argmax. bans: logits that min_tokens forbids, (rows, ids). The any_* are known on the
    host and spare the runner a question to the device.
    """

    batch: PagedBatch
    token_index: Tensor
    logit_rows: Tensor
    choice_index: Tensor
    draft_rows: Tensor
    lane_offset: Tensor
    ends: Tensor
    num_drafts: Tensor
    samples: Tensor
    max_drafts: Tensor
    max_total: Tensor
    sampling: list[SamplingRows]
    bans: tuple[Tensor, Tensor] | None
    any_samples: bool
    any_drafts: bool
    any_speculation: bool


def to_device(arrays: list[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Arrays of one dtype on the device, in one copy when that is a GPU (the CPU shares their memory)."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    flat = torch.from_numpy(np.concatenate([array.ravel() for array in arrays])).pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def ragged(lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Lengths [R] -> starts [R+1], and for each of the sum(lengths) elements its request and its index there."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return starts, owner, np.arange(starts[-1]) - starts[owner]


def build_step_inputs(plan: StepPlan, lanes: Lanes, num_speculative_tokens: int, device: torch.device) -> StepInputs:
    """Lay out the rows of a plan. `lanes` must have been given the plan's setups and blocks."""
    k = num_speculative_tokens
    lane = np.array(plan.lanes, dtype=np.int64)
    first = np.array(plan.starts, dtype=np.int64)
    query_lens = np.array(plan.query_lens, dtype=np.int64)
    num_drafts = np.array(plan.num_drafts, dtype=np.int64)
    samples = np.array(plan.samples, dtype=np.bool_)
    ends = first + query_lens
    max_context = int(ends.max())

    query_start, owner, within = ragged(query_lens)
    positions = first[owner] + within
    # the drafter's MTP slots lie up to K - 1 positions behind the target's rows
    width = min(-(-(max_context + max(k - 1, 0)) // lanes.block_size), lanes.block_tables.shape[1])
    block_tables = lanes.block_tables[lane, :width]
    slots = block_tables[owner, positions // lanes.block_size].astype(np.int64)
    slots = slots * lanes.block_size + positions % lanes.block_size

    num_logits = np.where(samples, num_drafts + 1, 0)
    logit_start, logit_owner, logit_within = ragged(num_logits)
    logit_rows = query_start[logit_owner + 1] - num_logits[logit_owner] + logit_within
    steps = np.arange(k + 1)
    choice_index = logit_start[:-1, None] + np.minimum(steps, num_drafts[:, None])
    np.minimum(choice_index, max(len(logit_rows) - 1, 0), out=choice_index)
    draft_rows = np.minimum(query_start[1:, None] - num_drafts[:, None] + steps[:k], len(positions) - 1)
    lane_offset = lane * lanes.width

    (
        moved_positions,
        slot_mapping,
        token_index,
        moved_logit_rows,
        moved_choice_index,
        moved_draft_rows,
        moved_lane_offset,
        moved_ends,
        moved_num_drafts,
        moved_samples,
        max_drafts,
        max_total,
    ) = to_device(
        [
            positions,
            slots,
            lane_offset[owner] + positions,
            logit_rows,
            choice_index,
            draft_rows,
            lane_offset,
            ends,
            num_drafts,
            samples.astype(np.int64),
            lanes.max_drafts[lane],
            lanes.max_total[lane],
        ],
        device,
    )
    tables, start32, context = to_device([block_tables, query_start.astype(np.int32), ends.astype(np.int32)], device)
    logit_lane, chosen_position = lane[logit_owner], positions[logit_rows] + 1
    return StepInputs(
        batch=PagedBatch(moved_positions, start32, context, tables, slot_mapping, int(query_lens.max()), max_context),
        token_index=token_index,
        logit_rows=moved_logit_rows,
        choice_index=moved_choice_index,
        draft_rows=moved_draft_rows,
        lane_offset=moved_lane_offset,
        ends=moved_ends,
        num_drafts=moved_num_drafts,
        samples=moved_samples.bool(),
        max_drafts=max_drafts,
        max_total=max_total,
        sampling=_sampling_rows(lanes, logit_lane, chosen_position, device),
        bans=_bans(lanes, logit_lane, chosen_position, device),
        any_samples=len(logit_rows) > 0,
        any_drafts=bool(num_drafts.any()),
        any_speculation=bool(lanes.max_drafts[lane].any()),
    )


def _sampling_rows(lanes: Lanes, lane: Ints, positions: Ints, device: torch.device) -> list[SamplingRows]:
    """The logits rows of requests that sample, those with top-k or top-p apart from those without.

    A request always goes the same way, whatever its neighbours want, so that its tokens do not depend on them.
    """
    sampled = lanes.temperature[lane] > 0
    if not sampled.any():
        return []
    filtered = sampled & ((lanes.top_k[lane] > 0) | (lanes.top_p[lane] < 1))
    groups = []
    for mask, has_filter in ((sampled & ~filtered, False), (filtered, True)):
        rows = np.flatnonzero(mask)
        if len(rows) == 0:
            continue
        owner = lane[rows]
        row, top_k, seed, position = to_device([rows, lanes.top_k[owner], lanes.seed[owner], positions[rows]], device)
        temperature, top_p = to_device([lanes.temperature[owner], lanes.top_p[owner]], device)
        groups.append(SamplingRows(row, temperature, top_k, top_p, seed, position, has_filter))
    return groups


def _bans(lanes: Lanes, lane: Ints, positions: Ints, device: torch.device) -> tuple[Tensor, Tensor] | None:
    banned = np.flatnonzero(positions < lanes.ban_until[lane])
    if len(banned) == 0:
        return None
    ids = [lanes.ban_ids[i] for i in lane[banned]]
    rows = np.repeat(banned, [len(i) for i in ids])
    columns = np.array([i for some in ids for i in some], dtype=np.int64)
    row, column = to_device([rows, columns], device)
    return row, column
