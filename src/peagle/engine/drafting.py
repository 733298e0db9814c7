"""The drafter's side of a step: K drafts a request, in one pass (P-EAGLE) or K passes (EAGLE-3).

On a GPU every shape is known before the step runs, padding included, so that nothing waits for the device and a step
can be captured. On the CPU rows that nobody needs are left out instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.engine.fused_drafter import FusedDrafter
from peagle.engine.sampler import argmax_rows
from peagle.kernels.draft_batch import (
    PADDING_SLOT_ID,
    DraftBatch,
    copy_hidden_states,
    expand_draft_batch,
    expand_draft_batch_on_host,
)
from peagle.target.fused import is_joined
from peagle.target.paged_attention import KVCache, PagedBatch, attend_paged


@dataclass(slots=True)
class Verified:
    """What the target's pass and verification leave for the drafter.

    token_ids [T] and aux [T, 3H] of the target's rows; next_token, num_rejected, num_drafts (wanted now) [R];
    takes_part [R]: requests with speculation.
    """

    token_ids: Tensor
    aux: Tensor
    next_token: Tensor
    num_rejected: Tensor
    num_drafts: Tensor
    takes_part: Tensor


def new_drafter_cache(drafter: Drafter, num_blocks: int, block_size: int, dtype: torch.dtype) -> KVCache:
    """The drafter's own pool of layers, under the target's block tables."""
    config, device = drafter.config, drafter.fc.weight.device
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return [
        (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(config.num_hidden_layers)
    ]


class DraftPass:
    """A bound drafter with its KV cache; `propose` gives K drafts a request."""

    def __init__(
        self,
        drafter: Drafter,
        num_drafts: int,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.drafter = drafter
        self.num_drafts = num_drafts
        self.block_size = block_size
        self.parallel = drafter.config.kind == "p-eagle"
        self.scale = drafter.config.head_dim**-0.5
        self.kv_cache = new_drafter_cache(drafter, num_blocks, block_size, cache_dtype or drafter.fc.weight.dtype)
        # on a CPU a prepared drafter only: a bare one, as tests make them, is left as it is
        fused = drafter.fc.weight.is_cuda or is_joined(drafter.layers)
        self.fused = FusedDrafter(drafter, max_model_len) if fused else None
        self.mask_state = drafter.mask_state() if self.parallel else None

    def propose(self, target: PagedBatch, verified: Verified, fixed_shape: bool = False) -> Tensor:
        """Drafts [R, K] in the target's vocabulary; only each request's first `num_drafts` mean anything.

        Also enters the accepted rows into the drafter's cache, over the MTP rows that stood there. fixed_shape: keep
        padding on the CPU too, as it is on a GPU.
        """
        fixed_shape = fixed_shape or verified.token_ids.is_cuda
        expand, copy_hidden = expand_draft_batch_on_host, copy_hidden_states
        if verified.token_ids.is_cuda:
            from peagle.kernels.draft_batch_triton import copy_hidden_states_triton, expand_draft_batch_triton

            expand, copy_hidden = expand_draft_batch_triton, copy_hidden_states_triton
        elif fixed_shape:
            expand = expand_draft_batch
        batch = expand(
            verified.token_ids,
            target.positions,
            target.query_start,
            verified.next_token,
            verified.num_rejected,
            verified.num_drafts,
            verified.takes_part,
            target.block_tables,
            self.block_size,
            self.num_drafts - 1 if self.parallel else 0,
            self.drafter.config.mask_token_id or 0,
        )
        hidden = copy_hidden(self.drafter.combine(verified.aux), self.mask_state, batch.hidden_rows, batch.is_masked)
        normed, feedback = self._run(batch, hidden, target)
        if self.parallel:
            return self._choose(normed, batch.sample_rows, verified.num_drafts, fixed_shape)
        return self._continue(normed, feedback, batch, target, verified.num_drafts, fixed_shape)

    def enter(self, token_ids: Tensor, aux: Tensor, batch: PagedBatch) -> None:
        """Enter true rows into the cache without drafting: token_ids [T], aux [T, 3H] at the rows of `batch`."""
        self._forward(token_ids, self.drafter.combine(aux), batch)

    def _run(self, batch: DraftBatch, hidden: Tensor, target: PagedBatch) -> tuple[Tensor, Tensor]:
        mask_rows = batch.sample_rows.shape[1] - 1
        paged = PagedBatch(
            batch.positions,
            batch.query_start,
            batch.context_lens,
            target.block_tables,
            batch.slot_mapping,
            target.max_query_len + mask_rows,
            target.max_context_len + mask_rows,
        )
        return self._forward(batch.token_ids, hidden, paged)

    def _forward(self, token_ids: Tensor, hidden: Tensor, paged: PagedBatch) -> tuple[Tensor, Tensor]:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend_paged(q, k, v, self.kv_cache[layer], paged, self.scale)

        embeds = self.drafter.embed(token_ids)
        if self.fused is not None:
            return self.fused(embeds, hidden, paged.positions, self.kv_cache, paged)
        return self.drafter(embeds, hidden, paged.positions, attend)

    def _argmax(self, normed: Tensor) -> Tensor:
        return self.drafter.to_target_ids(argmax_rows(self.drafter.logits(normed)))

    def _choose(self, normed: Tensor, rows: Tensor, num_drafts: Tensor, fixed_shape: bool) -> Tensor:
        """The argmax of rows [R, D] of normed, [R, D]; without a fixed shape only of rows that are wanted."""
        if fixed_shape or int(num_drafts.min()) >= rows.shape[1]:
            return self._argmax(normed[rows.flatten()]).view(rows.shape)
        wanted = torch.arange(rows.shape[1]) < num_drafts[:, None]
        drafts = torch.zeros_like(rows)
        if bool(wanted.any()):
            drafts[wanted] = self._argmax(normed[rows[wanted]])
        return drafts

    def _continue(
        self,
        normed: Tensor,
        feedback: Tensor,
        batch: DraftBatch,
        target: PagedBatch,
        num_drafts: Tensor,
        fixed_shape: bool,
    ) -> Tensor:
        """EAGLE-3: from the anchors' rows on, one row a request and pass, each fed the output of the one before."""
        anchors = batch.sample_rows[:, 0]
        drafts = torch.zeros(len(anchors), self.num_drafts, dtype=torch.int64, device=normed.device)
        drafts[:, :1] = self._choose(normed, batch.sample_rows, num_drafts, fixed_shape)
        members: Tensor | slice = slice(None)
        passes, tables = self.num_drafts, target.block_tables
        if not fixed_shape:  # leave out requests that want no further draft
            members = (num_drafts > 1).nonzero()[:, 0]
            passes, tables = int(num_drafts.max()), tables[members]
        anchors, token = anchors[members], drafts[members, 0]
        # where every pass's rows stand, [passes, members]
        depth = torch.arange(passes, device=normed.device)[:, None]
        positions = batch.positions[anchors] + depth
        wanted = depth < num_drafts[members]
        positions = torch.where(wanted, positions, 0)
        blocks = tables.gather(1, (positions // self.block_size).T).T.long()
        slots = torch.where(wanted, blocks * self.block_size + positions % self.block_size, PADDING_SLOT_ID)
        context_lens = (positions + 1).int()
        query_start = torch.arange(len(anchors) + 1, dtype=torch.int32, device=normed.device)
        hidden = feedback[anchors]
        for i in range(1, passes):
            context = target.max_context_len + i
            paged = PagedBatch(positions[i], query_start, context_lens[i], tables, slots[i], 1, context)
            normed, hidden = self._forward(token, hidden, paged)
            token = self._argmax(normed)
            drafts[members, i] = token
        return drafts
