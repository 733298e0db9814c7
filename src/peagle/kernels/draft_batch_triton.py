"""Triton kernels of the draft batch. Their specification, argument by argument, is `peagle.kernels.draft_batch`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.draft_batch import DraftBatch

BLOCK = 128


@triton.jit(do_not_specialize=["num_rows", "num_out_rows", "num_requests", "table_stride", "row_tiles"])
def _expand_kernel(
    token_out, position_out, rejected_out, masked_out, hidden_out, slot_out, sample_out, start_out, context_out,
    token_ptr, position_ptr, start_ptr, next_ptr, num_rejected_ptr, num_drafts_ptr, part_ptr, table_ptr,
    num_rows, num_out_rows, num_requests, table_stride, mask_token, row_tiles,
    MASK_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr, SEARCH_STEPS: tl.constexpr,
):  # fmt: skip
    # The first row_tiles programs write the drafter's rows, the rest what there is one of a request.
    tile = tl.program_id(0)
    if tile < row_tiles:
        n = tile * BLOCK + tl.arange(0, BLOCK)
        inside = n < num_out_rows
        # a request's first row stands at query_start[r] + r * MASK_ROWS: a binary search finds the request of a row
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + num_requests
        for _ in range(SEARCH_STEPS):
            middle = (low + high) // 2
            begin = tl.load(start_ptr + middle, mask=middle < num_requests, other=0) + middle * MASK_ROWS
            before = (middle < num_requests) & (begin <= n)
            low = tl.where(before, middle + 1, low)
            high = tl.where(before, high, middle)
        request = low - 1
        start = tl.load(start_ptr + request, mask=inside, other=0)
        end = tl.load(start_ptr + request + 1, mask=inside, other=0)
        num_true = end - start - tl.load(num_rejected_ptr + request, mask=inside, other=0).to(tl.int32)
        last_position = tl.load(position_ptr + start + num_true - 1, mask=inside, other=0)
        within = n - start - request * MASK_ROWS
        depth = within - num_true + 1  # of MTP rows; 0 and below for true rows
        part = tl.load(part_ptr + request, mask=inside, other=0) != 0
        wanted = tl.load(num_drafts_ptr + request, mask=inside, other=0)
        is_true = (depth <= 0) & part
        is_masked = (depth > 0) & (depth < wanted) & (depth <= MASK_ROWS) & part
        is_rejected = (is_true | is_masked) == 0

        hidden_row = tl.where(is_true, start + within, 0)
        following = hidden_row + 1
        shifted = tl.load(token_ptr + following, mask=inside & (following < num_rows), other=0)
        shifted = tl.where(depth == 0, tl.load(next_ptr + request, mask=inside, other=0), shifted)
        position = tl.where(is_rejected, 0, last_position + depth)
        block = tl.load(
            table_ptr + request.to(tl.int64) * table_stride + position // BLOCK_SIZE, mask=inside, other=0
        ).to(tl.int64)  # fmt: skip
        slot = block * BLOCK_SIZE + position % BLOCK_SIZE
        tl.store(token_out + n, tl.where(is_true, shifted, tl.where(is_masked, mask_token, 0)), mask=inside)
        tl.store(position_out + n, position, mask=inside)
        tl.store(rejected_out + n, is_rejected, mask=inside)
        tl.store(masked_out + n, is_masked, mask=inside)
        tl.store(hidden_out + n, hidden_row.to(tl.int64), mask=inside)
        tl.store(slot_out + n, tl.where(is_rejected, -1, slot), mask=inside)
    else:
        r = (tile - row_tiles) * BLOCK + tl.arange(0, BLOCK)
        inside = r < num_requests
        start = tl.load(start_ptr + r, mask=r <= num_requests, other=0)
        out_start = start + r * MASK_ROWS
        tl.store(start_out + r, out_start, mask=r <= num_requests)
        end = tl.load(start_ptr + r + 1, mask=inside, other=0)
        num_true = end - start - tl.load(num_rejected_ptr + r, mask=inside, other=0).to(tl.int32)
        for j in range(MASK_ROWS + 1):
            tl.store(sample_out + r * (MASK_ROWS + 1) + j, (out_start + num_true - 1 + j).to(tl.int64), mask=inside)
        last_position = tl.load(position_ptr + start + num_true - 1, mask=inside, other=0)
        wanted = tl.load(num_drafts_ptr + r, mask=inside, other=0)
        mask_rows = tl.minimum(tl.maximum(wanted - 1, 0), MASK_ROWS)
        tl.store(context_out + r, (last_position + 1 + mask_rows).to(tl.int32), mask=inside)


def expand_draft_batch_triton(
    token_ids: Tensor,
    positions: Tensor,
    query_start: Tensor,
    next_token_ids: Tensor,
    num_rejected: Tensor,
    num_drafts: Tensor,
    takes_part: Tensor,
    block_tables: Tensor,
    block_size: int,
    num_mask_rows: int,
    mask_token_id: int,
) -> DraftBatch:
    """As `peagle.kernels.draft_batch.expand_draft_batch`, in one launch. block_tables may have padded rows; the other
    tensors are contiguous."""
    requests, device = len(next_token_ids), token_ids.device
    rows = len(token_ids) + requests * num_mask_rows

    def empty(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    out = DraftBatch(
        token_ids=empty(rows),
        positions=empty(rows),
        is_rejected=empty(rows, dtype=torch.bool),
        is_masked=empty(rows, dtype=torch.bool),
        sample_rows=empty(requests, num_mask_rows + 1),
        hidden_rows=empty(rows),
        slot_mapping=empty(rows),
        query_start=empty(requests + 1, dtype=torch.int32),
        context_lens=empty(requests, dtype=torch.int32),
    )
    row_tiles = triton.cdiv(rows, BLOCK)
    _expand_kernel[(row_tiles + triton.cdiv(requests + 1, BLOCK),)](
        out.token_ids, out.positions, out.is_rejected, out.is_masked, out.hidden_rows, out.slot_mapping,
        out.sample_rows, out.query_start, out.context_lens,
        token_ids, positions, query_start, next_token_ids, num_rejected, num_drafts, takes_part, block_tables,
        len(token_ids), rows, requests, block_tables.stride(0), mask_token_id, row_tiles,
        MASK_ROWS=num_mask_rows, BLOCK_SIZE=block_size, BLOCK=BLOCK, SEARCH_STEPS=max(6, requests.bit_length()),
    )  # fmt: skip
    return out


@triton.jit
def _copy_hidden_kernel(
    out_ptr, states_ptr, mask_state_ptr, hidden_rows_ptr, is_masked_ptr, states_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    source = tl.load(hidden_rows_ptr + row)
    if HAS_MASK:
        masked = tl.load(is_masked_ptr + row) != 0
        if masked:
            value = tl.load(mask_state_ptr + column, mask=inside)
        else:
            value = tl.load(states_ptr + source * states_stride + column, mask=inside)
    else:
        value = tl.load(states_ptr + source * states_stride + column, mask=inside)
    tl.store(out_ptr + row * WIDTH + column, value, mask=inside)


def copy_hidden_states_triton(
    states: Tensor, mask_state: Tensor | None, hidden_rows: Tensor, is_masked: Tensor
) -> Tensor:
    """As `peagle.kernels.draft_batch.copy_hidden_states`, in one launch."""
    width = states.shape[1]
    if states.stride(1) != 1:
        states = states.contiguous()
    out = torch.empty((len(hidden_rows), width), dtype=states.dtype, device=states.device)
    block = min(1024, triton.next_power_of_2(width))
    _copy_hidden_kernel[(len(hidden_rows), triton.cdiv(width, block))](
        out, states, states if mask_state is None else mask_state, hidden_rows, is_masked, states.stride(0),
        WIDTH=width, BLOCK=block, HAS_MASK=mask_state is not None,
    )  # fmt: skip
    return out
