"""The runner's persistent state: one lane a running request, in arrays of fixed shape.

The token buffer lives on the device and holds everything known of a request in place: prompt, output and, behind them,
its standing drafts. The target's rows at positions p.. are therefore `tokens[lane, p:]` in prefill, chunked prefill and
verification alike, and the drafter's shifted token of position p is `tokens[lane, p + 1]`.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from peagle.engine.plan import LaneSetup, StepPlan
from peagle.kernels.decode_rows import store_drafts


class Lanes:
    """State of up to `max_num_seqs` requests.

    tokens [S, width] int32 on the device; its last column is written by rows that have nothing to write. Everything
    else is per lane on the host, as NumPy arrays: block_tables [S, max_blocks] int32, the limits and the sampling
    parameters.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, block_size: int, max_drafts: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.width = max_model_len + max_drafts + 2
        self.tokens = torch.zeros(max_num_seqs, self.width, dtype=torch.int32, device=device)
        self.flat_tokens = self.tokens.view(-1)
        self.block_tables = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)  # how much of its block table a lane uses
        self.max_drafts = np.zeros(max_num_seqs, dtype=np.int64)
        self.max_total = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_p = np.ones(max_num_seqs, dtype=np.float32)
        self.filtered = np.zeros(max_num_seqs, dtype=np.bool_)  # by min-p, top-k or top-p
        self.seed = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_seqs, dtype=np.int64)
        self.min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.penalised = np.zeros(max_num_seqs, dtype=np.bool_)
        self.penalties = np.zeros((3, max_num_seqs), dtype=np.float32)  # repetition, presence, frequency
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self.prompt_logprobs_from = np.zeros(max_num_seqs, dtype=np.int64)
        self.biased = np.zeros(max_num_seqs, dtype=np.bool_)
        self.logit_bias: list[tuple[tuple[int, ...], tuple[float, ...]]] = [((), ())] * max_num_seqs
        self.ban_until = np.zeros(max_num_seqs, dtype=np.int64)
        self.ban_ids: list[tuple[int, ...]] = [()] * max_num_seqs

    def enter(self, plan: StepPlan) -> list[tuple[int, Exception]]:
        """Enter the requests that start, and take their setups from the plan. Returns the lanes of those with a value
        that no lane can hold, and why: one request must not end the others."""
        failed: list[tuple[int, Exception]] = []
        for setup in plan.setups:
            try:
                self._set(setup)
            except Exception as error:
                failed.append((setup.lane, error))
        plan.setups.clear()
        return failed

    def apply(self, plan: StepPlan) -> None:
        """Enter the requests that start, if that has not been done, and the blocks that were added."""
        for _, error in self.enter(plan):
            raise error
        for lane, first, blocks in plan.new_blocks:
            self.block_tables[lane, first : first + len(blocks)] = blocks
            self.num_blocks[lane] = first + len(blocks)

    def store_drafts(self, drafts: Tensor, num_drafts: Tensor, lane_offset: Tensor, next_position: Tensor) -> None:
        """Write the wanted drafts of some lanes behind their next tokens (see `decode_rows.store_drafts`)."""
        if drafts.is_cuda:
            from peagle.kernels.decode_rows_triton import store_drafts_triton

            store_drafts_triton(self.flat_tokens, drafts, num_drafts, lane_offset, next_position)
        else:
            store_drafts(self.flat_tokens, self.width, drafts, num_drafts, lane_offset, next_position)

    def _set(self, setup: LaneSetup) -> None:
        lane, ids = setup.lane, setup.token_ids
        tokens = torch.tensor(
            ids, dtype=torch.int32, pin_memory=self.tokens.is_cuda
        )  # else the copy waits for the device
        self.tokens[lane, : len(ids)].copy_(tokens, non_blocking=True)
        self.max_drafts[lane] = setup.num_speculative_tokens
        self.max_total[lane] = setup.max_total_tokens
        self.temperature[lane] = setup.temperature
        self.top_k[lane] = setup.top_k
        self.top_p[lane] = setup.top_p
        self.filtered[lane] = setup.min_p > 0 or setup.top_k > 0 or setup.top_p < 1
        self.seed[lane] = setup.seed
        self.num_prompt[lane] = setup.num_prompt
        self.min_p[lane] = setup.min_p
        penalties = (setup.repetition_penalty, setup.presence_penalty, setup.frequency_penalty)
        self.penalties[:, lane] = penalties
        self.penalised[lane] = penalties != (1, 0, 0)
        self.num_logprobs[lane] = setup.num_logprobs
        self.num_prompt_logprobs[lane] = setup.num_prompt_logprobs
        self.prompt_logprobs_from[lane] = setup.prompt_logprobs_from
        self.biased[lane] = len(setup.logit_bias[0]) > 0
        self.logit_bias[lane] = setup.logit_bias
        self.ban_until[lane] = setup.ban_until
        self.ban_ids[lane] = setup.ban_ids
