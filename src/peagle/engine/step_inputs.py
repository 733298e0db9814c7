"""From a plan to the tensors of one step: all of it computed in NumPy and moved to the device in one copy a type."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.adjust import Adjustments, Penalties
from peagle.engine.lanes import Lanes
from peagle.engine.logprobs import ReportRows
from peagle.engine.plan import StepPlan
from peagle.engine.sampler import SamplingRows
from peagle.target.paged_attention import PagedBatch

Ints = NDArray[np.int64]


@dataclass(slots=True)
class StepInputs:
    """T rows of R requests, N of them with logits; K is the engine's number of drafts.

    The first num_choices of the logits rows choose tokens; those behind them are for prompt_report only.

    token_index [T]: where each row's token is in the flat token buffer. logit_rows [N]. choice_index [R, K+1]: which
    logits row chooses the token after the request's j-th verified row (repeating its last). draft_rows [R, K]: the row
    whose token is the j-th draft. lane_offset [R]: start of the lane in the flat token buffer. ends [R]: position
    behind the last row. num_drafts, samples [R] as in the plan; max_drafts [R]: how many to propose at most; takes_part
    [R] bool: whose rows the drafter runs; max_total, seed [R] as in Lanes. sampling: the rows that do not take the
    argmax. adjustments: what changes the logits first. report, prompt_report: the rows whose distribution is asked for.
    All three are None when no request needs them. The any_* are known on the host and spare the runner a question to
    the device; any_speculation: a request drafts in some step, any_drafting: the drafter runs in this one.
    """

    batch: PagedBatch
    token_index: Tensor
    logit_rows: Tensor
    num_choices: int
    choice_index: Tensor
    draft_rows: Tensor
    lane_offset: Tensor
    ends: Tensor
    num_drafts: Tensor
    samples: Tensor
    max_drafts: Tensor
    takes_part: Tensor
    max_total: Tensor
    seed: Tensor
    sampling: list[SamplingRows]
    adjustments: Adjustments | None
    report: ReportRows | None
    prompt_report: ReportRows | None
    any_logits: bool
    any_drafts: bool
    any_speculation: bool
    any_drafting: bool


def to_device(arrays: list[NDArray[np.generic]], device: torch.device) -> list[Tensor]:
    """Arrays of one dtype on the device, in one copy when that is a GPU (the CPU shares their memory)."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    # each begins at a multiple of 16 bytes: Triton compiles a kernel anew for pointers that do not
    unit = 16 // arrays[0].itemsize
    starts = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([-(-array.size // unit) * unit for array in arrays], out=starts[1:])
    flat = torch.empty(int(starts[-1]), dtype=torch.from_numpy(arrays[0][:0]).dtype, pin_memory=True)
    packed = flat.numpy()
    for start, array in zip(starts, arrays, strict=False):
        packed[start : start + array.size] = array.ravel()
    moved = flat.to(device, non_blocking=True)
    return [moved[start : start + a.size].view(a.shape) for start, a in zip(starts.tolist(), arrays, strict=False)]


def fill(buffer: Tensor, array: NDArray[np.generic]) -> None:
    """Copy an array into the beginning of a contiguous buffer of its dtype, without waiting for a GPU."""
    source = torch.empty(array.size, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
    source.numpy()[:] = array.ravel()
    buffer.view(-1)[: array.size].copy_(source, non_blocking=True)


def ragged(lengths: Ints) -> tuple[Ints, Ints, Ints]:
    """Lengths [R] -> starts [R+1], and for each of the sum(lengths) elements its request and its index there."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    return starts, owner, np.arange(starts[-1]) - starts[owner]


@dataclass(slots=True)
class PlanRows:
    """The rows of a plan, on the host.

    Per request [R]: lane, num_drafts, samples as in the plan, and ends, the position behind its last row. query_start
    [R+1]: rows of request r are query_start[r]:query_start[r+1]. Per row [T]: owner (its request), positions, slots.
    block_tables [R, what the step can touch].
    """

    lane: Ints
    num_drafts: Ints
    samples: NDArray[np.bool_]
    ends: Ints
    query_start: Ints
    owner: Ints
    positions: Ints
    slots: Ints
    block_tables: NDArray[np.int32]


def plan_rows(plan: StepPlan, lanes: Lanes, num_speculative_tokens: int) -> PlanRows:
    """Lay out the rows of a plan. `lanes` must have been given the plan's setups and blocks."""
    lane, first = np.array(plan.lanes, dtype=np.int64), np.array(plan.starts, dtype=np.int64)
    query_lens = np.array(plan.query_lens, dtype=np.int64)
    ends = first + query_lens
    query_start, owner, within = ragged(query_lens)
    positions = first[owner] + within
    # the drafter's MTP slots lie up to K - 1 positions behind the target's rows
    reached = int(ends.max()) + max(num_speculative_tokens - 1, 0)
    block_tables = lanes.block_tables[lane, : min(-(-reached // lanes.block_size), lanes.block_tables.shape[1])]
    slots = block_tables[owner, positions // lanes.block_size].astype(np.int64)
    slots = slots * lanes.block_size + positions % lanes.block_size
    num_drafts, samples = np.array(plan.num_drafts, dtype=np.int64), np.array(plan.samples, dtype=np.bool_)
    return PlanRows(lane, num_drafts, samples, ends, query_start, owner, positions, slots, block_tables)


def build_step_inputs(plan: StepPlan, lanes: Lanes, num_speculative_tokens: int, device: torch.device) -> StepInputs:
    """The tensors of a plan's step. `lanes` must have been given the plan's setups and blocks."""
    k = num_speculative_tokens
    rows_of = plan_rows(plan, lanes, k)
    lane, num_drafts, samples, ends = rows_of.lane, rows_of.num_drafts, rows_of.samples, rows_of.ends
    query_start, owner, positions = rows_of.query_start, rows_of.owner, rows_of.positions

    num_logits = np.where(samples, num_drafts + 1, 0)
    logit_start, logit_owner, logit_within = ragged(num_logits)
    logit_rows = query_start[logit_owner + 1] - num_logits[logit_owner] + logit_within
    num_choices = len(logit_rows)
    logit_lane, chosen_position = lane[logit_owner], positions[logit_rows] + 1
    steps = np.arange(k + 1)
    choice_index = logit_start[:-1, None] + np.minimum(steps, num_drafts[:, None])
    np.minimum(choice_index, max(num_choices - 1, 0), out=choice_index)
    draft_rows = np.minimum(query_start[1:, None] - num_drafts[:, None] + steps[:k], len(positions) - 1)
    lane_offset = lane * lanes.width
    token_index = lane_offset[owner] + positions
    wanted = lanes.max_drafts[lane]
    takes_part = wanted > 0
    any_speculation = bool(takes_part.any())
    if plan.drafting is not None:
        wanted, takes_part = np.array(plan.drafting.wanted, dtype=np.int64), np.array(plan.drafting.runs)
    report = _report(lanes, logit_lane, logit_owner, device)
    prompt_rows = _prompt_report_rows(lanes, lane, owner, positions)
    prompt_report = None
    if len(prompt_rows):
        logit_rows = np.concatenate((logit_rows, prompt_rows))
        rows = np.arange(num_choices, len(logit_rows))
        moved_rows, following = to_device([rows, token_index[prompt_rows] + 1], device)
        prompt_owner = owner[prompt_rows]
        prompt_report = ReportRows(moved_rows, following, prompt_owner, lanes.num_prompt_logprobs[lane[prompt_owner]])

    (
        moved_positions,
        slot_mapping,
        moved_token_index,
        moved_logit_rows,
        moved_choice_index,
        moved_draft_rows,
        moved_lane_offset,
        moved_ends,
        moved_num_drafts,
        moved_samples,
        max_drafts,
        moved_takes_part,
        max_total,
        seed,
    ) = to_device(
        [
            positions,
            rows_of.slots,
            token_index,
            logit_rows,
            choice_index,
            draft_rows,
            lane_offset,
            ends,
            num_drafts,
            samples.astype(np.int64),
            wanted,
            takes_part.astype(np.int64),
            lanes.max_total[lane],
            lanes.seed[lane],
        ],
        device,
    )
    tables, start32, context = to_device(
        [rows_of.block_tables, query_start.astype(np.int32), ends.astype(np.int32)], device
    )
    return StepInputs(
        batch=PagedBatch(
            moved_positions, start32, context, tables, slot_mapping, int(np.diff(query_start).max()), int(ends.max())
        ),
        token_index=moved_token_index,
        logit_rows=moved_logit_rows,
        num_choices=num_choices,
        choice_index=moved_choice_index,
        draft_rows=moved_draft_rows,
        lane_offset=moved_lane_offset,
        ends=moved_ends,
        num_drafts=moved_num_drafts,
        samples=moved_samples.bool(),
        max_drafts=max_drafts,
        takes_part=moved_takes_part.bool(),
        max_total=max_total,
        seed=seed,
        sampling=_sampling_rows(lanes, logit_lane, chosen_position, device),
        adjustments=_adjustments(lanes, logit_lane, chosen_position, device),
        report=report,
        prompt_report=prompt_report,
        any_logits=len(logit_rows) > 0,
        any_drafts=bool(num_drafts.any()),
        any_speculation=any_speculation,
        any_drafting=bool(takes_part.any()),
    )


def _sampling_rows(lanes: Lanes, lane: Ints, positions: Ints, device: torch.device) -> list[SamplingRows]:
    """The logits rows of requests that sample, those with min-p, top-k or top-p apart from those without.

    A request always goes the same way, whatever its neighbours want, so that its tokens do not depend on them.
    """
    sampled = lanes.temperature[lane] > 0
    if not sampled.any():
        return []
    filtered = sampled & lanes.filtered[lane]
    groups = []
    for mask, has_filter in ((sampled & ~filtered, False), (filtered, True)):
        rows = np.flatnonzero(mask)
        if len(rows) == 0:
            continue
        owner = lane[rows]
        row, top_k, seed, position = to_device([rows, lanes.top_k[owner], lanes.seed[owner], positions[rows]], device)
        temperature, top_p = to_device([lanes.temperature[owner], lanes.top_p[owner]], device)
        min_p = None
        if lanes.min_p[owner].any():
            (min_p,) = to_device([lanes.min_p[owner]], device)
        groups.append(SamplingRows(row, temperature, top_k, top_p, seed, position, has_filter, min_p))
    return groups


def _report(lanes: Lanes, lane: Ints, owner: Ints, device: torch.device) -> ReportRows | None:
    """The logits rows of requests that ask for logprobs; owner: the rows' requests."""
    rows = np.flatnonzero(lanes.num_logprobs[lane] >= 0)
    if len(rows) == 0:
        return None
    (moved,) = to_device([rows], device)
    return ReportRows(moved, None, owner[rows], lanes.num_logprobs[lane[rows]])


def _prompt_report_rows(lanes: Lanes, lane: Ints, owner: Ints, positions: Ints) -> Ints:
    """The rows of the step that predict a prompt token whose logprobs are asked for and not there yet."""
    if lanes.num_prompt_logprobs[lane].max() < 0:
        return np.zeros(0, dtype=np.int64)
    of_row, following = lane[owner], positions + 1
    wanted = (lanes.num_prompt_logprobs[of_row] >= 0) & (following < lanes.num_prompt[of_row])
    return np.flatnonzero(wanted & (following >= lanes.prompt_logprobs_from[of_row]))


def _adjustments(lanes: Lanes, lane: Ints, positions: Ints, device: torch.device) -> Adjustments | None:
    found = Adjustments(
        _bans(lanes, lane, positions, device), _bias(lanes, lane, device), _penalties(lanes, lane, positions, device)
    )
    return None if found.bans is None and found.bias is None and found.penalties is None else found


def _bias(lanes: Lanes, lane: Ints, device: torch.device) -> tuple[Tensor, Tensor, Tensor] | None:
    biased = np.flatnonzero(lanes.biased[lane])
    if len(biased) == 0:
        return None
    pairs = [lanes.logit_bias[i] for i in lane[biased]]
    rows = np.repeat(biased, [len(ids) for ids, _ in pairs])
    columns = np.array([i for ids, _ in pairs for i in ids], dtype=np.int64)
    row, column = to_device([rows, columns], device)
    (values,) = to_device([np.array([v for _, some in pairs for v in some], dtype=np.float32)], device)
    return row, column, values


def _penalties(lanes: Lanes, lane: Ints, positions: Ints, device: torch.device) -> Penalties | None:
    rows = np.flatnonzero(lanes.penalised[lane])
    if len(rows) == 0:
        return None
    owner, length = lane[rows], positions[rows]
    row, start, moved_length, num_prompt = to_device(
        [rows, owner * lanes.width, length, lanes.num_prompt[owner]], device
    )
    repetition, presence, frequency = to_device(list(lanes.penalties[:, owner]), device)
    longest = int(length.max())
    return Penalties(row, start, moved_length, num_prompt, longest, repetition, presence, frequency)


def _bans(lanes: Lanes, lane: Ints, positions: Ints, device: torch.device) -> tuple[Tensor, Tensor] | None:
    banned = np.flatnonzero(positions < lanes.ban_until[lane])
    if len(banned) == 0:
        return None
    ids = [lanes.ban_ids[i] for i in lane[banned]]
    rows = np.repeat(banned, [len(i) for i in ids])
    columns = np.array([i for some in ids for i in some], dtype=np.int64)
    row, column = to_device([rows, columns], device)
    return row, column
