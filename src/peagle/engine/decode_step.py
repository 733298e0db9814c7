"""A decoding step in tensors of fixed shape: B requests of K + 1 rows, on a GPU one CUDA graph a batch size.

A batch that only decodes needs nothing from the host between two steps: which tokens are verified, how many were
accepted and what is drafted next is all decided on the device, from the token buffer and a few numbers a request. So
the whole step (target, choice, verification, expansion, drafter) is recorded once and replayed, and the host may launch
the next one before it has read what this one decided. A request that drafts less has rows without a slot; shapes never
change. K = 0 is plain decoding. The same functions run unrecorded on the CPU, which is how they are tested.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.drafting import DraftPass, Verified
from peagle.engine.fetch import fetch_later
from peagle.engine.fixed_choice import GREEDY, SAMPLED, choose_fixed, settings_of, way_of
from peagle.engine.graphs import Graphs, capture_sizes
from peagle.engine.lanes import Lanes
from peagle.engine.plan import StepPlan, StepResult
from peagle.engine.step_inputs import fill, to_device
from peagle.engine.verification import accepts_anything
from peagle.kernels.decode_rows import LANE_OFFSET, NUM_DRAFTS, POSITION, SEED, TOP_K, lay_out_rows
from peagle.kernels.decode_rows import settle as settle_requests
from peagle.target.model import Target
from peagle.target.paged_attention import KVCache, PagedBatch


@dataclass(slots=True)
class DecodeBatch:
    """Device state of B requests, some of them padding (end 0).

    Rows of numbers [7, B] int64, numbered in `decode_rows`: position (of the last token, the first row to run),
    num_drafts (standing behind it), max_drafts, end (prompt and output never exceed it), seed, lane_offset (in the flat
    token buffer), top_k (0: off). Rows of settings [3, B] float32: temperature (0: greedy), top_p, min_p. block_tables
    [B, max_blocks] and query_start [B + 1] int32. result [B, K + 3]: the last step's tokens, how many drafts were
    accepted, how many stand now.
    """

    numbers: Tensor
    settings: Tensor
    block_tables: Tensor
    query_start: Tensor
    result: Tensor


class DecodeStep:
    """Runs plans that only decode; `fits` says which requests of a plan do.

    max_rows: the most target rows, K + 1 a request, of a batch; larger ones do not fit. synthetic_rates: see
    `accepts_anything`.
    """

    def __init__(
        self,
        target: Target,
        draft_pass: DraftPass | None,
        kv_cache: KVCache,
        lanes: Lanes,
        graphs: Graphs,
        num_drafts: int,
        max_rows: int,
        max_model_len: int,
        synthetic_rates: Tensor | None = None,
    ) -> None:
        self.target, self.draft_pass, self.kv_cache, self.lanes = target, draft_pass, kv_cache, lanes
        self.k, self.max_model_len, self.synthetic_rates = num_drafts, max_model_len, synthetic_rates
        self.aux_layer_ids = draft_pass.drafter.config.aux_hidden_state_layer_ids if draft_pass is not None else ()
        self.sizes = capture_sizes(len(lanes.block_tables), max_rows // (num_drafts + 1))
        self.graphs = graphs
        self._batches: dict[int, DecodeBatch] = {}
        self._current: tuple[NDArray[np.int64], DecodeBatch, int] | None = None  # lanes, batch, way of choosing

    def fits(self, plan: StepPlan) -> list[int]:
        """The requests of the plan that can be run: they decode, and nothing changes their logits or reports them."""
        lanes, lane = self.lanes, np.array(plan.lanes)
        decodes = np.array(plan.samples) & (np.array(plan.query_lens) == 1 + np.array(plan.num_drafts))
        adjusted = lanes.biased[lane] | lanes.penalised[lane]
        reported = lanes.num_logprobs[lane] >= 0
        banned = np.array(plan.starts) + 1 < lanes.ban_until[lane]
        found = np.flatnonzero(decodes & ~adjusted & ~reported & ~banned).tolist()
        if not self.sizes or len(found) > self.sizes[-1] or (self.k and not lanes.max_drafts[lane[found]].any()):
            return []
        return found

    def launch(self, plan: StepPlan, num_steps: int = 1) -> Callable[[], StepResult]:
        """Start num_steps decoding steps (several only without drafts); call what it returns to wait for the result.

        Tokens of several steps read like a run of accepted drafts.
        """
        lane = np.array(plan.lanes)
        size = next(size for size in self.sizes if size >= len(lane))
        way = way_of(self.lanes, lane)
        batch = self._load(plan, lane, size, way)
        self._current = lane, batch, way
        return self._run(num_steps)

    def repeat(self, plan: StepPlan, num_steps: int = 1) -> Callable[[], StepResult]:
        """As `launch` for the requests of the last launch, going on from what its steps will have left."""
        assert self._current is not None
        lane, batch, _ = self._current
        if plan.new_blocks:
            row_of = {int(name): row for row, name in enumerate(lane)}
            entries = [
                (row_of[name], first + i, block)
                for name, first, blocks in plan.new_blocks
                for i, block in enumerate(blocks)
            ]
            rows, columns, blocks = to_device(list(np.array(entries, dtype=np.int64).T), batch.block_tables.device)
            batch.block_tables[rows, columns] = blocks.int()
        return self._run(num_steps)

    def capture_all(self) -> None:
        """Record the graphs of every batch size now, the largest first, instead of when they are first needed."""
        for size in reversed(self.sizes):
            batch = self._batch(size)
            batch.numbers.zero_()
            for way in (GREEDY, SAMPLED):  # top-k and top-p need much memory for large batches: when first needed
                for _ in range(2):  # the second run records
                    self._advance_fast(batch, way)

    def _run(self, num_steps: int) -> Callable[[], StepResult]:
        assert self._current is not None
        lane, batch, way = self._current
        fetched = []
        for _ in range(num_steps):
            self._advance_fast(batch, way)
            fetched.append(fetch_later(batch.result))

        def wait() -> StepResult:
            steps = [fetch()[: len(lane)] for fetch in fetched]
            if num_steps == 1:
                return StepResult.from_rows(steps[0].tolist())
            tokens = np.concatenate([step[:, :1] for step in steps], axis=1).tolist()
            return StepResult(tokens, [num_steps - 1] * len(lane), [0] * len(lane))

        return wait

    def _batch(self, size: int) -> DecodeBatch:
        if size not in self._batches:
            device, width = self.target.device, self.lanes.block_tables.shape[1]
            numbers = torch.zeros(7, size, dtype=torch.int64, device=device)
            self._batches[size] = DecodeBatch(
                numbers,
                torch.zeros(3, size, dtype=torch.float32, device=device),
                torch.zeros(size, width, dtype=torch.int32, device=device),
                torch.arange(size + 1, dtype=torch.int32, device=device) * (self.k + 1),
                torch.zeros(size, self.k + 3, dtype=torch.int64, device=device),
            )
        return self._batches[size]

    def _load(self, plan: StepPlan, lane: NDArray[np.int64], size: int, way: int) -> DecodeBatch:
        batch, lanes, n = self._batch(size), self.lanes, len(lane)
        numbers = np.zeros((7, size), dtype=np.int64)
        numbers[:, :n] = (
            plan.starts,
            plan.num_drafts,
            lanes.max_drafts[lane],
            lanes.max_total[lane],
            lanes.seed[lane],
            lane * lanes.width,
            lanes.top_k[lane],
        )
        fill(batch.numbers, numbers)
        if way != GREEDY:
            fill(batch.settings, settings_of(lanes, lane, size))
        width = int(lanes.num_blocks[lane].max())
        (tables,) = to_device([lanes.block_tables[lane, :width]], batch.numbers.device)
        batch.block_tables[:n, :width].copy_(tables)
        return batch

    def _advance_fast(self, batch: DecodeBatch, way: int) -> None:
        if batch.result.is_cuda:
            self.graphs.run(("decode", len(batch.result), way), lambda: self._advance(batch, way))
        else:
            self._advance(batch, way)

    def _advance(self, batch: DecodeBatch, way: int) -> None:
        """One step of the whole batch, on the device alone."""
        lay_out, settle = lay_out_rows, settle_requests
        if batch.result.is_cuda:
            from peagle.kernels.decode_rows_triton import lay_out_rows_triton, settle_triton

            lay_out, settle = lay_out_rows_triton, settle_triton
        lanes, numbers, rows = self.lanes, batch.numbers, (len(batch.result), self.k + 1)
        token_ids, positions, slots, context_lens = lay_out(
            numbers, lanes.flat_tokens, batch.block_tables, lanes.block_size, self.k
        )
        paged = PagedBatch(
            positions, batch.query_start, context_lens, batch.block_tables, slots, self.k + 1, self.max_model_len
        )
        logits, aux = self.target.forward_paged(
            token_ids, positions, paged, self.kv_cache, slice(None), self.aux_layer_ids
        )
        assert logits is not None
        choices = choose_fixed(logits, way, batch.settings, numbers[TOP_K], numbers[SEED], positions.view(rows))
        accepted = None
        if self.synthetic_rates is not None:
            accepted = accepts_anything(self.synthetic_rates, numbers[SEED], numbers[POSITION])
        next_token, num_rejected, takes_part = settle(
            numbers,
            choices.view(rows),
            token_ids.view(rows),
            accepted,
            lanes.flat_tokens,
            lanes.width,
            batch.result,
        )
        if self.draft_pass is not None:
            assert aux is not None
            verified = Verified(token_ids, aux, next_token, num_rejected, numbers[NUM_DRAFTS], takes_part)
            drafts, _ = self.draft_pass.propose(paged, verified, fixed_shape=True)
            lanes.store_drafts(drafts, numbers[NUM_DRAFTS], numbers[LANE_OFFSET], numbers[POSITION])
