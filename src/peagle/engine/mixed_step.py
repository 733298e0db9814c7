"""A step whose rows are ragged, in padded shapes: on a GPU three CUDA graphs, and two or three copies to the device.

A step with prompts in it has any number of rows. Launched one by one its kernels take ten times as long as their work
for a small model, and every request that decodes beside a prompt would wait for them. So rows and requests are padded
to the next of a few sizes (rows of no request have no slot), and the target's pass, verification and the drafter's pass
are recorded for those. Where something changes or reports a request's logits, verification runs unrecorded
(`Runner`), and only the two passes are these. The same functions run unrecorded on the CPU, which is how they are
tested.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

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
from peagle.engine.step_inputs import fill, plan_rows, to_device
from peagle.engine.verification import accepts_anything
from peagle.kernels.decode_rows import LANE_OFFSET, NUM_DRAFTS, POSITION, SEED, TOP_K, settle
from peagle.kernels.draft_batch import PADDING_SLOT_ID
from peagle.target.model import Target
from peagle.target.paged_attention import KVCache, PagedBatch

# Rows and requests that the models' passes are padded to.
ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
REQUESTS = (4, 16, 64, 256, 1024)
# Numbers of a request behind the seven of `decode_rows`: whether it chooses a token, whether the drafter runs it.
SAMPLES, TAKES_PART, NUMBERS = 7, 8, 9
QUERY_END, CONTEXT = 0, 1  # its row behind the last, its position behind the last
Part = TypeVar("Part", Tensor, NDArray[np.int64])


def _even(count: int) -> int:
    """Parts of a buffer of int64 begin at multiples of 16 bytes: Triton compiles a kernel anew for pointers that do
    not."""
    return count + count % 2


class MixedStep:
    """Runs steps of up to max_rows rows, one at a time: `launch`, or for others than `fits` `load`, `target_states` and
    `propose`. max_choice_rows: the most rows of logits that a recorded verification has, K + 1 a request."""

    def __init__(
        self,
        target: Target,
        draft_pass: DraftPass | None,
        kv_cache: KVCache,
        lanes: Lanes,
        graphs: Graphs,
        max_rows: int,
        max_choice_rows: int,
        max_model_len: int,
        synthetic_rates: Tensor | None = None,
    ) -> None:
        self.target, self.draft_pass, self.kv_cache, self.graphs = target, draft_pass, kv_cache, graphs
        self.lanes, self.synthetic_rates = lanes, synthetic_rates
        self.k = draft_pass.num_drafts if draft_pass is not None else 0
        self.aux_layer_ids = draft_pass.drafter.config.aux_hidden_state_layer_ids if draft_pass is not None else ()
        self.max_rows, self.max_model_len = max_rows, max_model_len
        self.rows = (*(size for size in ROWS if size < max_rows), max_rows)
        most, width = lanes.block_tables.shape
        self.most = most
        self.requests = (*(size for size in REQUESTS if size < most), most)
        # rows of logits cost more than padding of the passes does, so verification has finer sizes, as decoding has
        self.choices = capture_sizes(most, max_choice_rows // (self.k + 1))
        self.rows_loaded = self.requests_loaded = 0

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=target.device)

        # one copy fills all of it: two spans and nine numbers of each request, and three numbers of each row
        self._stride, self._row_start = _even(most), (2 + NUMBERS) * _even(most)
        self._loaded = zeros(self._row_start + 3 * _even(max_rows))
        self._spans, self._numbers = self._requests_part(self._loaded)
        self.settings = zeros(3 * most, dtype=torch.float32)
        self.query_start = zeros(most + 1, dtype=torch.int32)
        self.context_lens = zeros(most, dtype=torch.int32)
        self.block_tables = zeros(most, width, dtype=torch.int32)
        self.token_ids = zeros(max_rows)
        self.hidden = zeros(max_rows, target.hidden_size, dtype=target.dtype)
        self.aux = zeros(max_rows, len(self.aux_layer_ids) * target.hidden_size, dtype=target.dtype)
        self.next_token, self.num_rejected = zeros(most), zeros(most)
        self.result = zeros(most, self.k + 3)

    def takes(self, rows: int) -> bool:
        """Whether a step of so many rows gains by being padded: not where the model turned out not to be recordable."""
        return rows <= self.max_rows and self.graphs.possible

    def fits(self, plan: StepPlan) -> bool:
        """Whether the whole step can be recorded: nothing changes its logits or reports them."""
        if not self.takes(sum(plan.query_lens)) or not self.choices or len(plan.lanes) > self.choices[-1]:
            return False
        lanes, lane = self.lanes, np.array(plan.lanes)
        chosen = np.array(plan.starts) + np.array(plan.query_lens) - np.array(plan.num_drafts)
        return not (
            (lanes.biased[lane] | lanes.penalised[lane]).any()
            or (lanes.num_logprobs[lane] >= 0).any()
            or (lanes.num_prompt_logprobs[lane] >= 0).any()
            or (np.array(plan.samples) & (chosen < lanes.ban_until[lane])).any()
        )

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Start a step that fits; call what it returns to wait for the result."""
        self.load(plan)
        lane = np.array(plan.lanes)
        way = way_of(self.lanes, lane[np.array(plan.samples)])
        padded = next(size for size in self.choices if size >= len(lane))
        if way != GREEDY:
            fill(self.settings, settings_of(self.lanes, lane, padded))
        self._run_target()
        self._run(("verify", padded, way), partial(self._verify, padded, way))
        if self.draft_pass is not None and self.lanes.max_drafts[lane].any():
            self._run_drafter()
        fetch = fetch_later(self.result[: len(lane)])
        return lambda: StepResult.from_rows(fetch().tolist())

    def load(self, plan: StepPlan) -> None:
        """Bring a plan's rows to the device."""
        lanes = self.lanes
        laid = plan_rows(plan, lanes, self.k)
        requests, rows = len(laid.lane), len(laid.positions)
        self.rows_loaded, self.requests_loaded = rows, requests
        size = self._size(rows)
        packed = np.zeros(self._row_start + 3 * _even(size), dtype=np.int64)
        spans, numbers = self._requests_part(packed)
        spans[QUERY_END], spans[CONTEXT] = rows, 1
        spans[:, :requests] = laid.query_start[1:], laid.ends
        lane, max_drafts = laid.lane, lanes.max_drafts[laid.lane]
        numbers[:, :requests] = (
            laid.ends - laid.num_drafts - 1,
            laid.num_drafts,
            max_drafts,
            np.where(laid.samples, lanes.max_total[lane], 0),  # one that chooses no token is settled like padding
            lanes.seed[lane],
            lane * lanes.width,
            lanes.top_k[lane],
            laid.samples,
            max_drafts > 0,
        )
        of_rows = self._rows_part(packed, size)
        of_rows[2] = PADDING_SLOT_ID
        of_rows[:, :rows] = (lane * lanes.width)[laid.owner] + laid.positions, laid.positions, laid.slots
        fill(self._loaded, packed)
        (tables,) = to_device([laid.block_tables], self.hidden.device)
        self.block_tables[:requests, : tables.shape[1]] = tables

    def target_states(self) -> tuple[Tensor, Tensor]:
        """The target's pass over the loaded rows: what its LM head reads [T, H], and the auxiliary states [T, 3H]."""
        self._run_target()
        return self.hidden[: self.rows_loaded], self.aux[: self.rows_loaded]

    def propose(self, next_token: Tensor, num_rejected: Tensor, num_drafts: Tensor, next_position: Tensor) -> None:
        """Draft behind the loaded rows and store the drafts; all [R], verified elsewhere: the chosen tokens, rejected
        drafts, how many are wanted now, and where the tokens stand."""
        for buffer, given in (
            (self.next_token, next_token),
            (self.num_rejected, num_rejected),
            (self._numbers[NUM_DRAFTS], num_drafts),
            (self._numbers[POSITION], next_position),
        ):
            buffer[: self.requests_loaded] = given
            buffer[self.requests_loaded :].zero_()
        self._run_drafter()

    def capture_all(self) -> None:
        """Record the graphs of all sizes now, the largest first. Nothing is written to the caches."""
        for size in reversed(self.rows):
            self._load_padding(size)
            for _ in range(2):  # the second run records
                self._run(("target", size), partial(self._target, size))
            if self.draft_pass is None:
                continue
            for padded in self._requests_within(size):
                for _ in range(2):
                    self._run(("drafter", size, padded), partial(self._propose, size, padded))
        for padded in reversed(self.choices):
            for way in (GREEDY, SAMPLED):  # top-k and top-p need much memory for large batches: when first needed
                for _ in range(2):
                    self._run(("verify", padded, way), partial(self._verify, padded, way))

    def _load_padding(self, size: int) -> None:
        """Rows of no request."""
        self._loaded.zero_()
        self._spans[QUERY_END], self._spans[CONTEXT] = size, 1
        self._rows_part(self._loaded, size)[2] = PADDING_SLOT_ID
        self.block_tables.zero_()

    def _size(self, rows: int) -> int:
        return next(size for size in self.rows if size >= rows)

    def _padded(self, requests: int) -> int:
        return next(size for size in self.requests if size >= requests)

    def _requests_within(self, rows: int) -> list[int]:
        """The numbers of requests that so many rows can be padded to: every request has a row or more."""
        most = self._padded(min(rows, self.most))
        return [size for size in self.requests if size <= most]

    def _run(self, key: tuple[str | int, ...], function: Callable[[], None]) -> None:
        if self.hidden.is_cuda:
            self.graphs.run(key, function)
        else:
            function()

    def _run_target(self) -> None:
        size = self._size(self.rows_loaded)
        self._run(("target", size), partial(self._target, size))

    def _run_drafter(self) -> None:
        size, padded = self._size(self.rows_loaded), self._padded(self.requests_loaded)
        self._run(("drafter", size, padded), partial(self._propose, size, padded))

    def _requests_part(self, loaded: Part) -> tuple[Part, Part]:
        """Spans [2, most] and numbers [9, most] in what is loaded, or in what is packed for it."""
        parts = loaded[: self._row_start].reshape(2 + NUMBERS, self._stride)[:, : self.most]
        return parts[:2], parts[2:]

    def _rows_part(self, loaded: Part, size: int) -> Part:
        """Where each row's token is in the token buffer, its position and its slot, [3, size]."""
        stride = _even(size)
        return loaded[self._row_start : self._row_start + 3 * stride].reshape(3, stride)[:, :size]

    def _batch(self, size: int, requests: int) -> PagedBatch:
        """The buffers' beginnings; one request may have all rows."""
        _, positions, slots = self._rows_part(self._loaded, size)
        return PagedBatch(
            positions,
            self.query_start[: requests + 1],
            self.context_lens[:requests],
            self.block_tables[:requests],
            slots,
            size,
            self.max_model_len,
        )

    def _target(self, size: int) -> None:
        index = self._rows_part(self._loaded, size)[0]
        self.query_start[1:] = self._spans[QUERY_END]
        self.context_lens[:] = self._spans[CONTEXT]
        self.token_ids[:size] = self.lanes.flat_tokens[index]
        batch = self._batch(size, min(size, self.most))
        hidden, aux = self.target.states_paged(
            self.token_ids[:size], batch.positions, batch, self.kv_cache, self.aux_layer_ids
        )
        self.hidden[:size] = hidden
        if aux is not None:
            self.aux[:size] = aux

    def _verify(self, requests: int, way: int) -> None:
        lanes, spans = self.lanes, self._spans[:, :requests]
        numbers = self._numbers[:, :requests].contiguous()  # as kernels want it
        num_drafts = numbers[NUM_DRAFTS].clone()
        depth = torch.arange(self.k + 1, device=numbers.device)
        rows = (spans[QUERY_END] - 1 - num_drafts)[:, None] + torch.minimum(depth, num_drafts[:, None])
        logits = self.target.lm_logits(self.hidden[rows.flatten()])
        positions = numbers[POSITION][:, None] + depth
        settings = self.settings[: 3 * requests].view(3, requests)
        choices = choose_fixed(logits, way, settings, numbers[TOP_K], numbers[SEED], positions)
        accepted = None
        if self.synthetic_rates is not None:
            accepted = accepts_anything(self.synthetic_rates, numbers[SEED], numbers[POSITION])
        in_place = lanes.flat_tokens[numbers[LANE_OFFSET] + spans[CONTEXT]].long()  # within a prompt
        run = settle
        if numbers.is_cuda:
            from peagle.kernels.decode_rows_triton import settle_triton

            run = settle_triton
        next_token, num_rejected, _ = run(
            numbers[:SAMPLES],
            choices.view(rows.shape),
            self.token_ids[rows],
            accepted,
            lanes.flat_tokens,
            lanes.width,
            self.result[:requests],
        )
        self._numbers[:, :requests] = numbers
        self.next_token[:requests] = torch.where(numbers[SAMPLES] > 0, next_token, in_place)
        self.num_rejected[:requests] = num_rejected - self.k + num_drafts  # of those that there were

    def _propose(self, size: int, requests: int) -> None:
        assert self.draft_pass is not None
        numbers = self._numbers[:, :requests]
        verified = Verified(
            self.token_ids[:size],
            self.aux[:size],
            self.next_token[:requests],
            self.num_rejected[:requests],
            numbers[NUM_DRAFTS],
            numbers[TAKES_PART] > 0,
        )
        drafts, _ = self.draft_pass.propose(self._batch(size, requests), verified, fixed_shape=True)
        self.lanes.store_drafts(drafts, numbers[NUM_DRAFTS], numbers[LANE_OFFSET], numbers[POSITION])
