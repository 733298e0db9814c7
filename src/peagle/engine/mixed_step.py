"""The passes of a step whose rows are ragged, in padded shapes: on a GPU a CUDA graph each.

A step with prompts in it, or with requests whose logits something changes, has any number of rows. Its sampling and
verification run in that shape, but target and drafter are hundreds of launches, which for a small model take ten times
as long as their work, and every request that decodes beside a prompt would wait for them. So both run over rows padded
to the next of a few sizes: rows of no request, without a slot. The same functions run unrecorded on the CPU, which is
how they are tested.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.engine.drafting import DraftPass, Verified
from peagle.engine.graphs import Graphs
from peagle.engine.lanes import Lanes
from peagle.kernels.draft_batch import PADDING_SLOT_ID
from peagle.target.model import Target
from peagle.target.paged_attention import KVCache, PagedBatch

# Rows and requests that passes are padded to.
ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
REQUESTS = (4, 16, 64, 256, 1024)


class MixedStep:
    """Runs the target's and the drafter's pass of up to max_rows rows. One step at a time: `target_states`, then
    `propose` for the same rows."""

    def __init__(
        self,
        target: Target,
        draft_pass: DraftPass | None,
        kv_cache: KVCache,
        lanes: Lanes,
        graphs: Graphs,
        max_rows: int,
        max_model_len: int,
    ) -> None:
        self.target, self.draft_pass, self.kv_cache, self.graphs = target, draft_pass, kv_cache, graphs
        self.aux_layer_ids = draft_pass.drafter.config.aux_hidden_state_layer_ids if draft_pass is not None else ()
        self.max_rows, self.max_model_len = max_rows, max_model_len
        self.rows = (*(size for size in ROWS if size < max_rows), max_rows)
        most, width = lanes.block_tables.shape
        self.most = most
        self.requests = (*(size for size in REQUESTS if size < most), most)

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        self.token_ids, self.positions, self.slots = zeros(max_rows), zeros(max_rows), zeros(max_rows)
        self.query_start, self.context_lens = zeros(most + 1, dtype=torch.int32), zeros(most, dtype=torch.int32)
        self.block_tables = zeros(most, width, dtype=torch.int32)
        self.next_token, self.num_rejected, self.num_drafts = zeros(most), zeros(most), zeros(most)
        self.takes_part = zeros(most, dtype=torch.bool)
        self.hidden = zeros(max_rows, target.hidden_size, dtype=target.dtype)
        self.aux = zeros(max_rows, len(self.aux_layer_ids) * target.hidden_size, dtype=target.dtype)
        self.drafts = zeros(most, draft_pass.num_drafts if draft_pass is not None else 0)

    def target_states(self, token_ids: Tensor, batch: PagedBatch) -> tuple[Tensor, Tensor]:
        """The target's pass over T rows: what its LM head reads [T, H], and the auxiliary states [T, 3H]."""
        rows, requests = len(token_ids), len(batch.context_lens)
        size = next(size for size in self.rows if size >= rows)
        for buffer, given, filling in (
            (self.token_ids, token_ids, 0),
            (self.positions, batch.positions, 0),
            (self.slots, batch.slot_mapping, PADDING_SLOT_ID),
        ):
            buffer[:rows] = given
            buffer[rows:size].fill_(filling)
        self.query_start[: requests + 1] = batch.query_start
        self.query_start[requests + 1 :].fill_(rows)
        self.context_lens[:requests] = batch.context_lens
        self.block_tables[:requests, : batch.block_tables.shape[1]] = batch.block_tables
        self._run(("target", size), lambda: self._target(size))
        return self.hidden[:rows], self.aux[:rows]

    def propose(self, batch: PagedBatch, verified: Verified) -> tuple[Tensor, Tensor]:
        """As `DraftPass.propose`, for the rows that `target_states` has just run."""
        requests = len(verified.next_token)
        size = next(size for size in self.rows if size >= len(verified.token_ids))
        padded = next(size for size in self.requests if size >= requests)
        for buffer, given in (
            (self.next_token, verified.next_token),
            (self.num_rejected, verified.num_rejected),
            (self.num_drafts, verified.num_drafts),
            (self.takes_part, verified.takes_part),
        ):
            buffer[:requests] = given
            buffer[requests:padded].zero_()
        self._run(("drafter", size, padded), lambda: self._propose(size, padded))
        return self.drafts[:requests], verified.num_drafts

    def capture_all(self) -> None:
        """Record the graphs of all sizes now, the largest first. Nothing is written to the caches."""
        self.slots.fill_(PADDING_SLOT_ID)
        self.context_lens.fill_(1)
        for buffer in (self.token_ids, self.positions, self.block_tables):
            buffer.zero_()
        for buffer in (self.next_token, self.num_rejected, self.num_drafts, self.takes_part):
            buffer.zero_()
        for size in reversed(self.rows):
            self.query_start.fill_(size)[0] = 0
            for _ in range(2):  # the second run records
                self._run(("target", size), lambda size=size: self._target(size))
            if self.draft_pass is None:
                continue
            for padded in self._requests_within(size):
                for _ in range(2):
                    self._run(
                        ("drafter", size, padded),
                        lambda size=size, padded=padded: self._propose(size, padded),
                    )

    def _requests_within(self, rows: int) -> list[int]:
        """The numbers of requests that so many rows can be padded to: every request has a row or more."""
        most = next(size for size in self.requests if size >= min(rows, self.most))
        return [size for size in self.requests if size <= most]

    def _run(self, key: tuple[str | int, ...], function: object) -> None:
        assert callable(function)
        if self.hidden.is_cuda:
            self.graphs.run(key, function)
        else:
            function()

    def _batch(self, rows: int, requests: int) -> PagedBatch:
        """The buffers' beginnings; one request may have all rows."""
        return PagedBatch(
            self.positions[:rows],
            self.query_start[: requests + 1],
            self.context_lens[:requests],
            self.block_tables[:requests],
            self.slots[:rows],
            rows,
            self.max_model_len,
        )

    def _target(self, rows: int) -> None:
        batch = self._batch(rows, min(rows, self.most))
        hidden, aux = self.target.states_paged(
            self.token_ids[:rows], batch.positions, batch, self.kv_cache, self.aux_layer_ids
        )
        self.hidden[:rows] = hidden
        if aux is not None:
            self.aux[:rows] = aux

    def _propose(self, rows: int, requests: int) -> None:
        assert self.draft_pass is not None
        verified = Verified(
            self.token_ids[:rows],
            self.aux[:rows],
            self.next_token[:requests],
            self.num_rejected[:requests],
            self.num_drafts[:requests],
            self.takes_part[:requests],
        )
        drafts, _ = self.draft_pass.propose(self._batch(rows, requests), verified, fixed_shape=True)
        self.drafts[:requests] = drafts
