"""Runs planned steps: target, verification, drafter. Owns the models, their KV caches and the lanes.

Knows lanes, positions and token ids, but no requests: when a request stops, and why, is not its business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.engine.adjust import adjust
from peagle.engine.decode_step import DecodeStep
from peagle.engine.drafting import DraftPass, Verified
from peagle.engine.fetch import fetch_later
from peagle.engine.graphs import Graphs
from peagle.engine.lanes import Lanes
from peagle.engine.late_rows import LateRows
from peagle.engine.logprobs import ReportRows, pack_logprobs, unpack_logprobs
from peagle.engine.mixed_step import MixedStep
from peagle.engine.plan import StepPlan, StepResult
from peagle.engine.sampler import choose
from peagle.engine.step_inputs import StepInputs, build_step_inputs
from peagle.engine.verification import accepts_anything, conditional_rates, verify
from peagle.target.model import Target


@dataclass(slots=True)
class Launched:
    """A step on its way. wait: what it decided, when the device has; repeatable: `Runner.repeat` can follow."""

    wait: Callable[[], StepResult]
    repeatable: bool


class Runner:
    """`launch` starts one step of a plan. Without a drafter every step is plain decoding, by the same code.

    On a GPU steps that only decode run in fixed shapes (`decode`), and others in padded ones (`mixed`); a step with
    more rows than these take runs in the shape that its rows have.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        num_speculative_tokens: int,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        num_scheduler_steps: int = 1,
        max_captured_rows: int = 0,
        max_mixed_rows: int = 0,
        synthetic_rates: tuple[float, ...] | None = None,
        cache_dtype: torch.dtype | None = None,
        late_drafting: bool = False,
        confidence_threshold: float = 0.0,
        draft_window: int | None = None,
    ) -> None:
        """max_captured_rows: the most target rows of a batch that only decodes and runs in fixed shapes, and of logits
        that are verified in one; max_mixed_rows: of another whose passes do; 0: none does. synthetic_rates:
        SpeculativeConfig's, for benchmarks.
        cache_dtype: of keys and values; None: the target's. late_drafting: plans may put the drafter's rows off.
        confidence_threshold: SpeculativeConfig's. draft_window: positions that the drafter's rows see, None for all."""
        self.target = target
        self.device = target.device
        self.num_speculative_tokens = num_speculative_tokens if drafter is not None else 0
        self.aux_layer_ids = drafter.config.aux_hidden_state_layer_ids if drafter is not None else ()
        self.lanes = Lanes(max_num_seqs, max_model_len, block_size, self.num_speculative_tokens, self.device)
        self.kv_cache = target.new_kv_cache(num_blocks, block_size, cache_dtype)
        self.draft_pass: DraftPass | None = None
        if drafter is not None:
            with torch.inference_mode():
                self.draft_pass = DraftPass(
                    drafter,
                    num_speculative_tokens,
                    num_blocks,
                    block_size,
                    max_model_len,
                    cache_dtype,
                    confidence_threshold,
                    draft_window,
                )
        self.late_rows: LateRows | None = None
        if self.draft_pass is not None and late_drafting:
            self.late_rows = LateRows(self.draft_pass, self.lanes, num_blocks, target.dtype)
        self.synthetic_rates = None if synthetic_rates is None else conditional_rates(synthetic_rates, self.device)
        self.num_scheduler_steps = num_scheduler_steps
        self.graphs = graphs = Graphs()
        self.mixed: MixedStep | None = None
        if max_mixed_rows > 0:
            with torch.inference_mode():
                self.mixed = MixedStep(
                    target,
                    self.draft_pass,
                    self.kv_cache,
                    self.lanes,
                    graphs,
                    max_mixed_rows,
                    max_captured_rows,
                    max_model_len,
                    self.synthetic_rates,
                )
        self.decode: DecodeStep | None = None
        if max_captured_rows > 0:
            with torch.inference_mode():
                self.decode = DecodeStep(
                    target,
                    self.draft_pass,
                    self.kv_cache,
                    self.lanes,
                    graphs,
                    self.num_speculative_tokens,
                    max_captured_rows,
                    max_model_len,
                    self.synthetic_rates,
                )

    @torch.inference_mode()
    def enter(self, plan: StepPlan) -> list[tuple[int, Exception]]:
        """Enter the requests that start in a plan, before its `launch`; as `Lanes.enter`."""
        return self.lanes.enter(plan)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> Launched:
        """Start one step; on a GPU this returns before the device is done."""
        self.lanes.apply(plan)
        found = self.decode.fits(plan) if self.decode is not None else []
        if self.decode is not None and len(found) == len(plan.lanes):
            return Launched(self.decode.launch(plan, self.num_scheduler_steps), True)
        if found and self.num_scheduler_steps > 1:
            result = self._execute_parts(plan, found)
            return Launched(lambda: result, False)
        return Launched(self._launch_once(plan), False)

    @torch.inference_mode()
    def repeat(self, plan: StepPlan) -> Launched:
        """Start the last launch's step once more, which must have been `repeatable`, for the same lanes; of the plan
        only its new blocks count."""
        assert self.decode is not None
        self.lanes.apply(plan)
        return Launched(self.decode.repeat(plan, self.num_scheduler_steps), True)

    @torch.inference_mode()
    def capture(self) -> None:
        """Record every CUDA graph now, so that no request has to wait for it. Raises torch.OutOfMemoryError."""
        if self.device.type != "cuda":
            return
        with self.graphs.at_start():
            for step in (self.decode, self.mixed):
                if step is not None:
                    step.capture_all()

    def _execute_parts(self, plan: StepPlan, burst: list[int]) -> StepResult:
        """Several decoding steps for the requests of `burst`, one step for the rest."""
        assert self.decode is not None
        rest = sorted(set(range(len(plan.lanes))) - set(burst))
        result = StepResult([[]] * len(plan.lanes), [0] * len(plan.lanes), [0] * len(plan.lanes))
        first = self._launch_once(plan.part(rest))()
        for index, part in ((rest, first), (burst, self.decode.launch(plan.part(burst), self.num_scheduler_steps)())):
            for i, tokens, accepted in zip(index, part.tokens, part.num_accepted, strict=True):
                result.tokens[i], result.num_accepted[i] = tokens, accepted
            result.logprobs |= {index[i]: rows for i, rows in part.logprobs.items()}
            result.prompt_logprobs |= {index[i]: rows for i, rows in part.prompt_logprobs.items()}
        return result

    def _launch_once(self, plan: StepPlan) -> Callable[[], StepResult]:
        if self.mixed is not None and self.mixed.fits(plan):
            return self.mixed.launch(plan)
        return self._execute(plan)

    def _execute(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Run a plan in the shape that its rows have; call what it returns to wait for the result."""
        inputs = build_step_inputs(plan, self.lanes, self.num_speculative_tokens, self.device)
        token_ids = self.lanes.flat_tokens[inputs.token_index].long()
        drafting = self.draft_pass is not None and inputs.any_drafting
        keeping = self.late_rows is not None and inputs.any_speculation
        made_up = 0.0
        mixed = self.mixed if self.mixed is not None and self.mixed.takes(len(token_ids)) else None
        aux: Tensor | None
        if mixed is not None:
            mixed.load(plan)
            hidden, aux = mixed.target_states()
        else:
            aux_layer_ids = self.aux_layer_ids if drafting or keeping else ()
            hidden, aux = self.target.states_paged(
                token_ids, inputs.batch.positions, inputs.batch, self.kv_cache, aux_layer_ids
            )
        logits = self.target.lm_logits(hidden[inputs.logit_rows]) if inputs.any_logits else None
        packed: list[Tensor] = []  # logprobs, for the requests that ask
        tokens, num_accepted, next_token = self._verify(logits, token_ids, inputs, packed)
        # where the next token stands: behind the accepted rows (in an unfinished prompt it is there already)
        next_position = inputs.ends - inputs.num_drafts + num_accepted
        self.lanes.flat_tokens[inputs.lane_offset + next_position] = next_token.int()
        # near its limit a request drafts less: a later step adds at most its drafts and one token
        room = torch.minimum(inputs.max_drafts, inputs.max_total - next_position - 2).clamp_(min=0)
        num_drafts = torch.where(inputs.samples, room, 0)
        if keeping:
            assert self.late_rows is not None
            assert aux is not None
            self.late_rows.keep(inputs.batch.slot_mapping, aux)
            if plan.drafting is not None:
                made_up = self.late_rows.make_up(plan)
        num_rejected = inputs.num_drafts - num_accepted
        if drafting and mixed is not None:
            mixed.propose(next_token, num_rejected, num_drafts, next_position)
        elif drafting:
            assert self.draft_pass is not None
            assert aux is not None
            verified = Verified(token_ids, aux, next_token, num_rejected, num_drafts, inputs.takes_part)
            drafts, num_drafts = self.draft_pass.propose(inputs.batch, verified)
            self.lanes.store_drafts(drafts, num_drafts, inputs.lane_offset, next_position)
        decided = torch.cat((tokens, num_accepted[:, None], num_drafts[:, None]), dim=1)
        if not packed:
            fetch = fetch_later(decided)
            return lambda: self._result(fetch().tolist(), made_up)
        shape = decided.shape
        parts = [decided, *packed]
        sizes = [part.numel() for part in parts]
        fetch = fetch_later(torch.cat([part.flatten() for part in parts]))  # all of it at once

        def wait() -> StepResult:
            numbers = np.split(fetch(), np.cumsum(sizes)[:-1])
            result = self._result(numbers.pop(0).reshape(shape).tolist(), made_up)
            for report, found in (
                (inputs.report, result.logprobs),
                (inputs.prompt_report, result.prompt_logprobs),
            ):
                if report is not None:
                    for owner, logprobs in unpack_logprobs(numbers.pop(0), report):
                        found.setdefault(owner, []).append(logprobs)
            return result

        return wait

    @staticmethod
    def _result(rows: list[list[int]], make_up_seconds: float) -> StepResult:
        result = StepResult.from_rows(rows)
        result.make_up_seconds = make_up_seconds
        return result

    def _verify(
        self, logits: Tensor | None, token_ids: Tensor, inputs: StepInputs, packed: list[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose and verify: (tokens [R, K+1], num_accepted [R], next token [R]), as in `verify`.

        Logprobs that are asked for are appended to `packed`, those of chosen tokens first.
        """
        in_place = self.lanes.flat_tokens[inputs.lane_offset + inputs.ends].long()
        none = torch.zeros_like(in_place)
        if logits is None:  # parts of prompts only
            return in_place[:, None].expand(-1, self.num_speculative_tokens + 1), none, in_place
        choices = self._choose(logits, inputs, packed)
        if inputs.num_choices == 0:
            return in_place[:, None].expand(-1, self.num_speculative_tokens + 1), none, in_place
        tokens, num_accepted = choices[inputs.choice_index], none
        if inputs.any_drafts:
            accepted = None
            if self.synthetic_rates is not None:
                accepted = accepts_anything(self.synthetic_rates, inputs.seed, inputs.ends - inputs.num_drafts - 1)
            tokens, num_accepted = verify(tokens, token_ids[inputs.draft_rows], inputs.num_drafts, accepted)
        next_token = tokens.gather(1, num_accepted[:, None])[:, 0]
        return tokens, num_accepted, torch.where(inputs.samples, next_token, in_place)

    def _choose(self, logits: Tensor, inputs: StepInputs, packed: list[Tensor]) -> Tensor:
        """The target's choices [num_choices] from logits [N, V], and reports on them and on prompt tokens."""
        chosen_from = logits
        raw, report, prompt_report = None, inputs.report, inputs.prompt_report
        if prompt_report is not None:
            chosen_from = logits[: inputs.num_choices]
        if report is not None:
            raw = logits[report.rows]  # a copy: adjustments change the logits in place
        if inputs.adjustments is not None:
            chosen_from = adjust(chosen_from, inputs.adjustments, self.lanes.flat_tokens)
        choices = choose(chosen_from, inputs.sampling)
        if report is not None:
            assert raw is not None
            packed.append(self._report(raw, choices[report.rows], report))
        if prompt_report is not None:
            tokens = self.lanes.flat_tokens[prompt_report.token_index].long()
            packed.append(self._report(logits[inputs.num_choices :], tokens, prompt_report))
        return choices

    @staticmethod
    def _report(logits: Tensor, tokens: Tensor, report: ReportRows) -> Tensor:
        return pack_logprobs(logits, tokens, int(report.num_top.max()))
