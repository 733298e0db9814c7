"""The drafter's side of a step: K drafts a request, in one pass (P-EAGLE) or K passes (EAGLE-3).

On a GPU every shape is known before the step runs, padding included, so that nothing waits for the device and a step
can be captured. On the CPU rows that nobody needs are left out instead.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.engine.argmax import argmax_rows
from peagle.engine.fused_drafter import FusedDrafter
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
        confidence_threshold: float = 0.0,
        window: int | None = None,
    ) -> None:
        """confidence_threshold: SpeculativeConfig's; it holds where shapes are not fixed. window: a row at p sees the
        positions p - window + 1 .. p, or all up to p."""
        self.drafter = drafter
        self.threshold = confidence_threshold
        self.window = window
        self.num_drafts = num_drafts
        self.block_size = block_size
        self.parallel = drafter.config.kind == "p-eagle"
        self.scale = drafter.config.head_dim**-0.5
        self.kv_cache = new_drafter_cache(drafter, num_blocks, block_size, cache_dtype or drafter.fc.weight.dtype)
        # on a CPU a prepared drafter only: a bare one, as tests make them, is left as it is
        fused = drafter.fc.weight.is_cuda or is_joined(drafter.layers)
        self.fused = FusedDrafter(drafter, max_model_len, window) if fused else None
        self.mask_state = drafter.mask_state() if self.parallel else None

    def propose(self, target: PagedBatch, verified: Verified, fixed_shape: bool = False) -> tuple[Tensor, Tensor]:
        """Drafts [R, K] in the target's vocabulary, of which each request's first [R] mean anything: as many as are
        wanted, or fewer where the drafter does not trust the next one.

        Also enters the accepted rows into the drafter's cache, over the MTP rows that stood there. fixed_shape: keep
        padding on the CPU too, as it is on a GPU.
        """
        fixed_shape = fixed_shape or verified.token_ids.is_cuda
        if self.drafter.vocabulary is not None:
            self.drafter.vocabulary.see(verified.token_ids.numpy())
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
            drafts, probs = self._choose(normed, batch.sample_rows, verified.num_drafts, fixed_shape)
            return drafts, self._trusted(probs, verified.num_drafts)
        return self._continue(normed, feedback, batch, target, verified.num_drafts, fixed_shape)

    def enter(self, token_ids: Tensor, aux: Tensor, batch: PagedBatch) -> None:
        """Enter true rows into the cache without drafting: token_ids [T], aux [T, 3H] at the rows of `batch`."""
        if self.drafter.vocabulary is not None:
            self.drafter.vocabulary.see(token_ids.numpy())
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
            return attend_paged(q, k, v, self.kv_cache[layer], paged, self.scale, self.window)

        embeds = self.drafter.embed(token_ids)
        if self.fused is not None:
            return self.fused(embeds, hidden, paged.positions, self.kv_cache, paged)
        return self.drafter(embeds, hidden, paged.positions, attend)

    def _draft(self, normed: Tensor, fixed_shape: bool) -> tuple[Tensor, Tensor | None]:
        """The argmax of rows [N, H] in the target's vocabulary, and where it counts its probability by the drafter."""
        logits = self.drafter.logits(normed)
        if not self.threshold or fixed_shape:
            return self.drafter.to_target_ids(argmax_rows(logits)), None
        probs = logits.softmax(dim=-1, dtype=torch.float32)
        best = argmax_rows(probs)
        return self.drafter.to_target_ids(best), probs.gather(1, best[:, None])[:, 0]

    def _choose(
        self, normed: Tensor, rows: Tensor, num_drafts: Tensor, fixed_shape: bool
    ) -> tuple[Tensor, Tensor | None]:
        """`_draft` of rows [R, D] of normed, [R, D] each; without a fixed shape only of rows that are wanted."""
        if fixed_shape or int(num_drafts.min()) >= rows.shape[1]:
            drafts, probs = self._draft(normed[rows.flatten()], fixed_shape)
            return drafts.view(rows.shape), None if probs is None else probs.view(rows.shape)
        wanted = torch.arange(rows.shape[1]) < num_drafts[:, None]
        drafts, probs = torch.zeros_like(rows), None
        if bool(wanted.any()):
            drafts[wanted], found = self._draft(normed[rows[wanted]], fixed_shape)
            if found is not None:
                probs = found.new_zeros(rows.shape)
                probs[wanted] = found
        return drafts, probs

    def _trusted(self, probs: Tensor | None, num_drafts: Tensor) -> Tensor:
        """How many drafts [R] are verified: those whose joint probability, by the drafter, reaches the threshold."""
        if probs is None:
            return num_drafts
        counts = []
        for row, wanted in zip(probs.tolist(), num_drafts.tolist(), strict=True):  # few numbers: tensors take longer
            joint, count = 1.0, 0
            for prob in row[:wanted]:
                joint *= prob
                if joint < self.threshold:
                    break
                count += 1
            counts.append(count)
        return torch.tensor(counts, dtype=num_drafts.dtype)

    def _continue(
        self,
        normed: Tensor,
        feedback: Tensor,
        batch: DraftBatch,
        target: PagedBatch,
        num_drafts: Tensor,
        fixed_shape: bool,
    ) -> tuple[Tensor, Tensor]:
        """EAGLE-3: from the anchors' rows on, one row a request and pass, each fed the output of the one before."""
        anchors = batch.sample_rows[:, 0]
        drafts = torch.zeros(len(anchors), self.num_drafts, dtype=torch.int64, device=normed.device)
        drafts[:, :1], first = self._choose(normed, batch.sample_rows, num_drafts, fixed_shape)
        probs = None
        if first is not None:
            probs = first.new_zeros(drafts.shape)  # of drafts that are not made
            probs[:, :1] = first
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
            if probs is not None and not bool((self._trusted(probs, num_drafts)[members] == i).any()):
                break  # nobody goes on
            context = target.max_context_len + i
            paged = PagedBatch(positions[i], query_start, context_lens[i], tables, slots[i], 1, context)
            normed, hidden = self._forward(token, hidden, paged)
            token, found = self._draft(normed, fixed_shape)
            drafts[members, i] = token
            if probs is not None and found is not None:
                probs[members, i] = found
        return drafts, self._trusted(probs, num_drafts)
