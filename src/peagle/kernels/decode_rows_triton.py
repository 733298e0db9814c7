"""Triton kernels of a decoding step's bookkeeping. Their specification is `peagle.kernels.decode_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _lay_out_kernel(
    token_out, position_out, slot_out, context_out, numbers_ptr, flat_ptr, table_ptr,
    size, table_stride, K: tl.constexpr, PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    j = tl.arange(0, PAD)
    inside = j <= K
    position = tl.load(numbers_ptr + request)
    num_drafts = tl.load(numbers_ptr + size + request)
    end = tl.load(numbers_ptr + 3 * size + request)
    lane = tl.load(numbers_ptr + 5 * size + request)
    runs = position + 1 < end
    live = (j <= num_drafts) & runs
    positions = tl.where(live, position + j, 0)
    token = tl.load(flat_ptr + lane + positions, mask=inside, other=0)
    block = tl.load(table_ptr + request.to(tl.int64) * table_stride + positions // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE
    row = request * (K + 1) + j
    tl.store(token_out + row, token.to(tl.int64), mask=inside)
    tl.store(position_out + row, positions, mask=inside)
    tl.store(slot_out + row, tl.where(live, slot, -1), mask=inside)
    tl.store(context_out + request, tl.where(runs, position + num_drafts + 1, 1).to(tl.int32))


def lay_out_rows_triton(
    numbers: Tensor, flat_tokens: Tensor, block_tables: Tensor, block_size: int, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `lay_out_rows`, in one launch."""
    requests = numbers.shape[1]
    rows = torch.empty((3, requests * (k + 1)), dtype=torch.int64, device=numbers.device)
    context_lens = torch.empty(requests, dtype=torch.int32, device=numbers.device)
    token_ids, positions, slots = rows
    _lay_out_kernel[(requests,)](
        token_ids, positions, slots, context_lens, numbers, flat_tokens, block_tables, requests,
        block_tables.stride(0), K=k, PAD=triton.next_power_of_2(k + 1), BLOCK_SIZE=block_size, num_warps=1,
    )  # fmt: skip
    return token_ids, positions, slots, context_lens


@triton.jit
def _settle_kernel(
    next_out, rejected_out, part_out, result_ptr, numbers_ptr, choice_ptr, token_ptr, accepted_ptr, flat_ptr,
    size, lane_width, K: tl.constexpr, PAD: tl.constexpr, IS_SYNTHETIC: tl.constexpr,
):  # fmt: skip
    request = tl.program_id(0)
    j = tl.arange(0, PAD)
    position = tl.load(numbers_ptr + request)
    num_drafts = tl.load(numbers_ptr + size + request)
    max_drafts = tl.load(numbers_ptr + 2 * size + request)
    end = tl.load(numbers_ptr + 3 * size + request)
    lane = tl.load(numbers_ptr + 5 * size + request)
    runs = position + 1 < end
    row = request * (K + 1) + j
    choice = tl.load(choice_ptr + row, mask=j <= K, other=0)
    draft = tl.load(token_ptr + row + 1, mask=j < K, other=0)
    agreed = tl.load(accepted_ptr + request * K + j, mask=j < K, other=0) != 0 if IS_SYNTHETIC else choice == draft
    agreed = agreed & (j < num_drafts) & (j < K) & runs
    accepted = tl.min(tl.where(agreed, PAD, j), 0)  # the first that is not; without drafts there is one, at 0
    next_token = tl.sum(tl.where(j == accepted, choice, 0), 0)
    next_position = tl.where(runs, position + 1 + accepted, position)
    room = tl.maximum(tl.minimum(max_drafts, end - next_position - 2), 0)
    tl.store(flat_ptr + lane + tl.where(runs, next_position, lane_width - 1), next_token.to(tl.int32))
    tl.store(result_ptr + request * (K + 3) + j, tl.where(j < accepted, draft, choice), mask=j <= K)
    tl.store(result_ptr + request * (K + 3) + K + 1, accepted.to(tl.int64))
    tl.store(result_ptr + request * (K + 3) + K + 2, room)
    tl.store(next_out + request, next_token)
    tl.store(rejected_out + request, (K - accepted).to(tl.int64))
    tl.store(part_out + request, runs & (max_drafts > 0))
    tl.store(numbers_ptr + request, next_position)
    tl.store(numbers_ptr + size + request, room)


def settle_triton(
    numbers: Tensor,
    choices: Tensor,
    token_ids: Tensor,
    accepted: Tensor | None,
    flat_tokens: Tensor,
    width: int,
    result: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `settle`, in one launch; all tensors are contiguous."""
    requests, k = choices.shape[0], choices.shape[1] - 1
    next_token, num_rejected = torch.empty((2, requests), dtype=torch.int64, device=numbers.device)
    takes_part = torch.empty(requests, dtype=torch.bool, device=numbers.device)
    _settle_kernel[(requests,)](
        next_token, num_rejected, takes_part, result, numbers, choices, token_ids,
        choices if accepted is None else accepted, flat_tokens, requests, width,
        K=k, PAD=triton.next_power_of_2(k + 1), IS_SYNTHETIC=accepted is not None, num_warps=1,
    )  # fmt: skip
    return next_token, num_rejected, takes_part


@triton.jit
def _store_drafts_kernel(
    flat_ptr, draft_ptr, num_drafts_ptr, lane_ptr, position_ptr, draft_stride, K: tl.constexpr, PAD: tl.constexpr
):  # fmt: skip
    request = tl.program_id(0)
    j = tl.arange(0, PAD)
    wanted = (j < tl.load(num_drafts_ptr + request)) & (j < K)
    first = tl.load(lane_ptr + request) + tl.load(position_ptr + request) + 1
    draft = tl.load(draft_ptr + request * draft_stride + j, mask=wanted, other=0)
    tl.store(flat_ptr + first + j, draft.to(tl.int32), mask=wanted)


def store_drafts_triton(
    flat_tokens: Tensor, drafts: Tensor, num_drafts: Tensor, lane_offset: Tensor, next_position: Tensor
) -> None:
    """As `store_drafts`, in one launch; drafts that are not wanted go nowhere."""
    requests, k = drafts.shape
    if drafts.stride(1) != 1:
        drafts = drafts.contiguous()
    _store_drafts_kernel[(requests,)](
        flat_tokens, drafts, num_drafts, lane_offset, next_position, drafts.stride(0),
        K=k, PAD=triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip
