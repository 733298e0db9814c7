"""The draft batch: from the target's verification rows to the drafter's rows (docs/method.md, "One decoding step").

The drafter's row for position p reads token x[p+1] and the target's auxiliary states at p, and its keys and values go
to the slot of position p. So after verification a request has its accepted rows with tokens shifted by one, the last of
them reading the token that verification added, then K - 1 MTP rows at the positions behind, and as padding the rejected
rows, so that the batch's shape is known before verification is done: T + R * (K - 1) rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A row with this slot writes no keys and values.
PADDING_SLOT_ID = -1


@dataclass(slots=True)
class DraftBatch:
    """N drafter rows of R requests, each request's in the order true rows, MTP rows, rejected rows.

    token_ids, positions [N] int64 (0 for rejected rows); is_rejected, is_masked [N] bool (masked: an MTP row);
    sample_rows [R, M+1]: the row of the last anchor and of the M MTP rows behind it; hidden_rows [N]: the target row
    whose state each row reads (0 for MTP and rejected rows); slot_mapping [N]; query_start [R+1] and context_lens [R]
    int32 as in PagedBatch.
    """

    token_ids: Tensor
    positions: Tensor
    is_rejected: Tensor
    is_masked: Tensor
    sample_rows: Tensor
    hidden_rows: Tensor
    slot_mapping: Tensor
    query_start: Tensor
    context_lens: Tensor


def expand_draft_batch(
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
    """Copy and expand the target's rows into the drafter's.

    token_ids, positions [T]: the rows that the target ran; query_start [R+1] int32: where each request's begin. Rows
    behind the last request's, and requests without rows, are padding.
    next_token_ids [R]: the token behind the last row that stands (the bonus token, or in a prompt the next prompt
    token). num_rejected [R]: rows at a request's end that verification rejected. num_drafts [R]: drafts wanted; only
    the first num_drafts - 1 MTP rows are real, the others count as rejected. takes_part [R] bool: requests without
    speculation have all their rows rejected. block_tables [R, max_blocks] int32. num_mask_rows M: K - 1 for P-EAGLE, 0
    for EAGLE-3.
    """
    num_requests, device = len(next_token_ids), token_ids.device
    row_start = query_start.long()
    out_start = row_start + torch.arange(num_requests + 1, device=device) * num_mask_rows
    out_rows = torch.arange(len(token_ids) + num_requests * num_mask_rows, device=device)
    request = torch.searchsorted(out_start[1:], out_rows, right=True).clamp_(max=num_requests - 1)
    within = out_rows - out_start[request]

    num_true = row_start[1:] - row_start[:-1] - num_rejected
    last_row = row_start[:-1] + num_true - 1
    last_position = positions[last_row]
    depth = within - num_true[request] + 1  # of MTP rows; 0 and below for true rows
    is_true = (depth <= 0) & takes_part[request]
    is_masked = (depth > 0) & (depth < num_drafts[request]) & (depth <= num_mask_rows) & takes_part[request]
    is_rejected = ~(is_true | is_masked)

    hidden_rows = torch.where(is_true, row_start[request] + within, 0)
    shifted = token_ids[(hidden_rows + 1).clamp_(max=len(token_ids) - 1)]
    shifted = torch.where(depth == 0, next_token_ids[request], shifted)
    out_tokens = torch.where(is_true, shifted, torch.where(is_masked, mask_token_id, 0))
    out_positions = torch.where(is_rejected, 0, last_position[request] + depth)

    block = block_tables[request, out_positions // block_size].long()
    slots = torch.where(is_rejected, PADDING_SLOT_ID, block * block_size + out_positions % block_size)
    anchor = (out_start[:-1] + num_true - 1)[:, None]
    sample_rows = anchor + torch.arange(num_mask_rows + 1, device=device)
    real_mask_rows = (num_drafts - 1).clamp(0, num_mask_rows)
    context_lens = (last_position + 1 + real_mask_rows).int()
    return DraftBatch(
        out_tokens,
        out_positions,
        is_rejected,
        is_masked,
        sample_rows,
        hidden_rows,
        slots,
        out_start.int(),
        context_lens,
    )


def expand_draft_batch_on_host(
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
    """`expand_draft_batch` of CPU tensors, without the rejected rows; their sample_rows point at row 0.

    A step of one request is a dozen rows, where what an operation costs is being called: lists are several times
    cheaper than arrays, and padding that is dropped again need not be made.
    """
    tokens, place, first = token_ids.tolist(), positions.tolist(), query_start.tolist()
    rejected, drafts, takes = num_rejected.tolist(), num_drafts.tolist(), takes_part.tolist()
    out_tokens: list[int] = []
    out_positions: list[int] = []
    hidden_rows: list[int] = []
    slots: list[int] = []
    sample_rows: list[list[int]] = []
    is_masked: list[bool] = []
    context_lens: list[int] = []
    out_start = [0]
    for r, (next_token, table) in enumerate(zip(next_token_ids.tolist(), block_tables.tolist(), strict=True)):
        begin, end = first[r], first[r + 1] - rejected[r]
        masks = min(max(drafts[r] - 1, 0), num_mask_rows)
        context_lens.append(place[end - 1] + 1 + masks)
        samples = [0] * (num_mask_rows + 1)
        if takes[r]:
            anchor = len(out_tokens) + end - begin - 1
            samples[: masks + 1] = range(anchor, anchor + masks + 1)
            out_tokens += [*tokens[begin + 1 : end], next_token, *[mask_token_id] * masks]
            where = range(place[begin], context_lens[-1])
            out_positions += where
            slots += [table[p // block_size] * block_size + p % block_size for p in where]
            hidden_rows += [*range(begin, end), *[0] * masks]
            is_masked += [False] * (end - begin) + [True] * masks
        sample_rows.append(samples)
        out_start.append(len(out_tokens))
    return DraftBatch(
        torch.tensor(out_tokens, dtype=torch.int64),
        torch.tensor(out_positions, dtype=torch.int64),
        torch.zeros(len(out_tokens), dtype=torch.bool),
        torch.tensor(is_masked, dtype=torch.bool),
        torch.tensor(sample_rows, dtype=torch.int64),
        torch.tensor(hidden_rows, dtype=torch.int64),
        torch.tensor(slots, dtype=torch.int64),
        torch.tensor(out_start, dtype=torch.int32),
        torch.tensor(context_lens, dtype=torch.int32),
    )


def copy_hidden_states(states: Tensor, mask_state: Tensor | None, hidden_rows: Tensor, is_masked: Tensor) -> Tensor:
    """Hidden inputs of the drafter's rows: states[hidden_rows], [N, H], and in MTP rows the broadcast mask_state [H].

    states [T, H]: the target rows' auxiliary states after `fc`. mask_state None (EAGLE-3): there are no MTP rows.
    """
    hidden = states[hidden_rows]
    return hidden if mask_state is None else torch.where(is_masked[:, None], mask_state, hidden)
