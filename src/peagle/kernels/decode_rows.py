"""The bookkeeping of a decoding step in fixed shapes, before the target's pass and after it.

Both are a few integers a request, which as separate PyTorch operations take some forty launches; as Triton kernels
(`decode_rows_triton`) they take three. What is here is their specification and what the CPU runs.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of the state [7, B] of a batch (engine/decode_step.py says what they are).
POSITION, NUM_DRAFTS, MAX_DRAFTS, END, SEED, LANE_OFFSET, TOP_K = range(7)


def lay_out_rows(
    numbers: Tensor, flat_tokens: Tensor, block_tables: Tensor, block_size: int, k: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The K + 1 rows of each request: token_ids, positions, slots [B * (K + 1)], and context_lens [B] int32.

    A row is live when its request has not reached its end and so many drafts stand; others are at position 0, without
    a slot. flat_tokens [S] int32: the token buffer. block_tables [B, max_blocks] int32.
    """
    position, num_drafts = numbers[POSITION], numbers[NUM_DRAFTS]
    depth = torch.arange(k + 1, device=numbers.device)
    runs = position + 1 < numbers[END]
    live = runs[:, None] & (depth <= num_drafts[:, None])
    positions = torch.where(live, position[:, None] + depth, 0)
    token_ids = flat_tokens[numbers[LANE_OFFSET][:, None] + positions].long()
    blocks = block_tables.gather(1, positions // block_size).long()
    slots = torch.where(live, blocks * block_size + positions % block_size, -1)
    context_lens = torch.where(runs, position + num_drafts + 1, 1).int()
    return token_ids.flatten(), positions.flatten(), slots.flatten(), context_lens


def settle(
    numbers: Tensor,
    choices: Tensor,
    token_ids: Tensor,
    accepted: Tensor | None,
    flat_tokens: Tensor,
    width: int,
    result: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify (as `engine.verification.verify`), write the next token, and move each request on.

    choices, token_ids [B, K + 1]: what the target chose after each row, and the rows' tokens, drafts from the second
    on. accepted [B, K] or None: synthetic acceptance. Changes position and num_drafts in `numbers`, the token buffer
    (width: of a lane, whose last column is written by requests that have nothing to write), and result [B, K + 3]:
    tokens, accepted drafts, drafts wanted now. Returns next_token, num_rejected [B] int64, takes_part [B] bool.
    """
    k = choices.shape[1] - 1
    position, end, max_drafts = numbers[POSITION], numbers[END], numbers[MAX_DRAFTS]
    depth = torch.arange(k, device=numbers.device)
    runs = position + 1 < end
    drafts = token_ids[:, 1:]
    agreed = (choices[:, :-1] == drafts) if accepted is None else accepted
    agreed = agreed & (depth < numbers[NUM_DRAFTS][:, None]) & runs[:, None]
    num_accepted = agreed.long().cumprod(dim=1).sum(dim=1)
    next_token = choices.gather(1, num_accepted[:, None])[:, 0]
    next_position = torch.where(runs, position + 1 + num_accepted, position)
    flat_tokens[numbers[LANE_OFFSET] + torch.where(runs, next_position, width - 1)] = next_token.int()
    # near its limit a request drafts less: the next step adds at most its drafts and one token
    room = torch.minimum(max_drafts, end - next_position - 2).clamp_(min=0)
    result[:, :k] = torch.where(depth < num_accepted[:, None], drafts, choices[:, :-1])
    result[:, k] = choices[:, -1]
    result[:, k + 1] = num_accepted
    result[:, k + 2] = room
    takes_part = runs & (max_drafts > 0)
    numbers[POSITION] = next_position
    numbers[NUM_DRAFTS] = room
    return next_token, k - num_accepted, takes_part


def store_drafts(
    flat_tokens: Tensor, width: int, drafts: Tensor, num_drafts: Tensor, lane_offset: Tensor, next_position: Tensor
) -> None:
    """Write the drafts [R, K] of lanes that begin at lane_offset [R] behind the next token, at next_position [R].

    Those beyond num_drafts [R] go to the lane's unused last column (width: of a lane) or nowhere, because in an
    unfinished prompt real tokens stand there.
    """
    depth = torch.arange(drafts.shape[1], device=drafts.device)
    column = torch.where(depth < num_drafts[:, None], next_position[:, None] + 1 + depth, width - 1)
    flat_tokens[lane_offset[:, None] + column] = drafts.int()
