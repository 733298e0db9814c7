"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np

from peagle.config.engine import EngineConfig
from peagle.draft_table import DraftTable
from peagle.drafter.model import Drafter
from peagle.engine.checks import (
    captured_rows,
    check_depth,
    check_min_tokens,
    check_params,
    check_prompt,
    check_threshold,
    count_logprobs,
    make_planner,
    mixed_rows,
    resolve_window,
    runs_ahead,
    warn_of_lengths,
)
from peagle.engine.detokenizer import Detokenizer
from peagle.engine.kv_cache import BlockManager
from peagle.engine.logprobs import TokenNames
from peagle.engine.memory import cache_dtype, fit_model_len, num_kv_blocks
from peagle.engine.outputs import StepOutput
from peagle.engine.plan import StepResult, TokenLogprobs
from peagle.engine.request import Request, Status
from peagle.engine.runner import Launched, Runner
from peagle.engine.sampling_params import MAX_SEED, SamplingParams
from peagle.engine.scheduler import Schedule, Scheduler
from peagle.engine.stats import EngineStats, SpecMetrics
from peagle.engine.step_timing import time_steps
from peagle.errors import InputError
from peagle.target.model import Target

log = logging.getLogger(__name__)


class Engine:
    """Continuous batching over one target and, if given, one bound drafter with `num_speculative_tokens` drafts.

    synthetic_rates: for benchmarks only, accept drafts by chance and not by what they are (SpeculativeConfig).
    draft_table: its num_speculative_tokens_per_batch_size; confidence_threshold, draft_window: as it has them.
    Raises InputError for settings that do not fit together or into memory.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        num_speculative_tokens: int = 0,
        config: EngineConfig | None = None,
        synthetic_rates: tuple[float, ...] | None = None,
        draft_table: DraftTable | None = None,
        confidence_threshold: float = 0.0,
        draft_window: int | Literal["auto"] | None = "auto",
    ) -> None:
        self.config = config = config or EngineConfig()
        target.check_paged()
        self.target = target
        self.drafter = drafter
        if drafter is not None:
            check_depth(drafter, num_speculative_tokens)
            target.check_aux_layer_ids(drafter.config.aux_hidden_state_layer_ids)
        elif num_speculative_tokens:
            raise InputError(f"num_speculative_tokens: got {num_speculative_tokens} without a drafter, expected 0")
        self.num_speculative_tokens = num_speculative_tokens
        self.draft_window: int | None = None
        self.draft_planner = make_planner(
            config, target.device, num_speculative_tokens, draft_table, synthetic_rates is not None
        )
        late = self.draft_planner is not None
        check_threshold(confidence_threshold, target.device, late)
        wanted = config.max_model_len or target.max_model_len
        if wanted > target.max_model_len:
            raise InputError(f"max_model_len: got {wanted}, expected at most the model's {target.max_model_len}")
        budget = config.batched_tokens(target.device.type, wanted)
        num_blocks = num_kv_blocks(target, drafter, config, wanted, budget, num_speculative_tokens, late)
        self.max_model_len = fit_model_len(
            num_blocks, config, wanted, target.device, chosen_by_user=config.max_model_len is not None
        )
        if self.max_model_len < wanted:
            log.warning(
                "the KV cache holds %d tokens: max_model_len is lowered from %d to that", self.max_model_len, wanted
            )
        if drafter is not None:
            self.draft_window = resolve_window(draft_window, drafter.config, self.max_model_len)
            warn_of_lengths(drafter.config, self.max_model_len, self.draft_window)
        self.blocks = BlockManager(num_blocks, config.block_size)
        steps = config.num_scheduler_steps
        if drafter is not None and steps > 1:
            raise InputError(f"num_scheduler_steps: got {steps}, expected 1 with speculative decoding")
        self.scheduler = Scheduler(
            self.blocks,
            config.max_num_seqs,
            budget,
            config.enable_chunked_prefill,
            steps,
            config.enable_prefix_caching,
        )
        self.runner = Runner(
            target,
            drafter,
            num_speculative_tokens,
            num_blocks,
            config.block_size,
            config.max_num_seqs,
            self.max_model_len,
            steps,
            captured_rows(config, target.device, num_speculative_tokens),
            mixed_rows(config, target.device, budget, sum(p.numel() for p in target.layers.parameters())),
            synthetic_rates,
            cache_dtype(target, config),
            late,
            confidence_threshold,
            self.draft_window,
        )
        self.synthetic = synthetic_rates is not None
        if self.synthetic:
            log.warning(
                "SYNTHETIC ACCEPTANCE: drafts are accepted by chance (rates %s), whatever they are. The output is no "
                "text of the model; use this for benchmarks only",
                ", ".join(f"{rate:g}" for rate in synthetic_rates or ()),
            )
        self.stats = EngineStats(synthetic=self.synthetic)
        self.requests: dict[str, Request] = {}
        self._runs_ahead = runs_ahead(config, target.device)
        self._flight: tuple[Schedule, Launched] | None = None  # the step that was started early
        self._failed: list[StepOutput] = []  # of requests that could not be entered, not told yet
        self._names = TokenNames(target.tokenizer)
        self._seeds = np.random.default_rng(config.seed)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        stream_interval: int = 0,
    ) -> Request:
        """Queue a request, one completion. Raises InputError for one that cannot be run, before anything has changed.

        stream_interval: report the text that may be sent (`StepOutput.new_text`) with the first tokens, then with so
        many at a time and at the end; 0: never. The returned request is for reading; it stays valid after it has
        finished.
        """
        params = params or SamplingParams()
        vocab, limit = self.target.vocab_size, self.config.max_logprobs
        prompt = check_prompt(prompt_token_ids, self.max_model_len, vocab)
        if request_id in self.requests:
            raise InputError(f"request_id: {request_id!r} is in use already, expected a new one")
        check_params(params, self.target)
        room = self.max_model_len - len(prompt)
        check_min_tokens(params.min_tokens, room, self.max_model_len)
        own_k = params.num_speculative_tokens
        request = Request(
            request_id=request_id,
            prompt_token_ids=prompt,
            params=params,
            max_total_tokens=len(prompt) + min(params.max_tokens or room, room),
            num_speculative_tokens=self.num_speculative_tokens
            if own_k is None
            else min(own_k, self.num_speculative_tokens),
            eos_token_ids=self.target.eos_token_ids,
            seed=params.seed if params.seed is not None else int(self._seeds.integers(MAX_SEED)),
            stream_interval=stream_interval,
            metrics=SpecMetrics(synthetic=self.synthetic),
            num_logprobs=count_logprobs("logprobs", params.logprobs, limit, vocab),
            num_prompt_logprobs=count_logprobs("prompt_logprobs", params.prompt_logprobs, limit, vocab),
        )
        if params.stop_strings or stream_interval:
            request.detokenizer = self._detokenizer(request)
        self.requests[request_id] = request
        self.scheduler.add(request)
        self.stats.num_prompt_tokens += len(prompt)
        return request

    def _detokenizer(self, request: Request) -> Detokenizer | None:
        if self.target.tokenizer is None:
            return None
        params = request.params
        return Detokenizer(
            self.target.tokenizer,
            request.prompt_token_ids,
            params.stop_strings,
            params.skip_special_tokens,
            params.include_stop_str_in_output,
        )

    def text(self, request: Request) -> str:
        """A finished request's text, as streaming would have given it; empty without a tokenizer."""
        detokenizer = request.detokenizer
        if detokenizer is None:
            if (detokenizer := self._detokenizer(request)) is None:
                return ""
            detokenizer.push(request.text_token_ids(), may_stop=False)
        request.show()
        detokenizer.finish()
        return detokenizer.text

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def abort(self, request_id: str) -> bool:
        """Drop a request in any state; False when it is not (or no longer) there."""
        if self._failed:  # a step raised before it could tell them
            self._failed = [output for output in self._failed if output.request_id != request_id]
        request = self.requests.pop(request_id, None)
        if request is None:
            return False
        self.scheduler.abort(request)
        return True

    def step(self) -> list[StepOutput]:
        """Run one step; what it added to each request that got tokens. An empty list when there is nothing to do.

        On a GPU the next step is under way when this returns (`async_scheduling`), started as early as can be: before
        this one's result is there when the batch will stay as it is, else before the result is turned into text. What
        a step computes for requests that have ended meanwhile is dropped.
        """
        began = time.perf_counter()
        flight, self._flight = self._flight, None
        if flight is None or all(request.status is Status.FINISHED for request in flight[0].requests):
            flight = self._launch()
        if flight is None:
            return self._take_failed()
        schedule, launched = flight
        if self._runs_ahead and launched.repeatable and (ahead := self.scheduler.repeat(schedule)) is not None:
            self._flight = ahead, self.runner.repeat(ahead.plan)
        result = launched.wait()
        if self.draft_planner is not None:
            self.draft_planner.observe(schedule.plan, result, time.perf_counter() - began)
        advanced = self._advance(schedule, result)
        if self._runs_ahead and self._flight is None:
            self._flight = self._launch()
        return [self._output(*one) for one in advanced] + self._take_failed()

    def _launch(self) -> tuple[Schedule, Launched] | None:
        """Plan a step and start it; None when there is nothing to run."""
        schedule = self.scheduler.schedule()
        self.stats.num_preemptions += len(schedule.preempted)
        self.stats.prefix_cache_queries += schedule.cache_queries
        self.stats.prefix_cache_hits += schedule.cache_hits
        for lane, error in self.runner.enter(schedule.plan):
            self._fail(schedule, lane, error)
        if not schedule.requests:
            return None
        if self.draft_planner is not None:
            self.draft_planner.plan(schedule.requests, schedule.plan)
        return schedule, self.runner.launch(schedule.plan)

    def _fail(self, schedule: Schedule, lane: int, error: Exception) -> None:
        """End the one request whose values no lane can hold; nothing of it has run, and the others go on without it."""
        request = schedule.without(lane)
        del self.requests[request.request_id]
        self.scheduler.abort(request, "error")
        self._failed.append(StepOutput(request.request_id, [], [], True, "error", error=error))

    def _take_failed(self) -> list[StepOutput]:
        failed, self._failed = self._failed, []
        return failed

    def capture(self) -> None:
        """Do now what the first steps would take longer for: on a GPU record the CUDA graphs of all batch sizes; where
        the number of drafts is chosen by load, time a few steps (some seconds, and statistics are reset)."""
        self.runner.capture()
        time_steps(self)

    def _advance(
        self, schedule: Schedule, result: StepResult
    ) -> list[tuple[Request, list[int], int, list[TokenLogprobs]]]:
        """Enter a step's result into its requests: all that planning the next step needs.

        Returns what it added: (request, tokens, how many of them came from drafts, reports on them).
        """
        if schedule.ahead:
            self.scheduler.catch_up(schedule)
        plan = schedule.plan
        advanced = []
        for i, request in enumerate(schedule.requests):
            if request.status is Status.FINISHED:  # ended or aborted while the step ran
                continue
            computed = plan.starts[i] + plan.query_lens[i]
            if plan.samples[i]:
                computed += result.num_accepted[i] - plan.num_drafts[i]
            request.num_computed = computed
            if (drafting := plan.drafting) is not None:
                reached = computed if drafting.runs[i] else drafting.first[i] + drafting.make_up[i]
                self.scheduler.drafter_reached(request, reached)
            if request.prompt_logprobs is not None:
                request.prompt_logprobs += [self._names.report(report) for report in result.prompt_logprobs.get(i, ())]
            if not plan.samples[i]:
                self.scheduler.cache_computed(request)
                continue
            drafted, accepted = plan.num_drafts[i], result.num_accepted[i]
            request.num_drafts = result.num_drafts[i]
            new = result.tokens[i][: accepted + 1]
            kept = request.append(new)
            self.scheduler.cache_computed(request)
            # a run that an end cuts short counts only for what was kept of it
            from_drafts = min(accepted, kept) if drafted else 0
            if drafted:
                request.metrics.add(drafted, from_drafts)
                self.stats.spec.add(drafted, from_drafts)
                self.stats.by_context.add(plan.starts[i] + 1, from_drafts)
            self.stats.num_output_tokens += kept
            advanced.append((request, new[:kept], from_drafts, result.logprobs.get(i, [])[:kept]))
        finished = [request for request, *_ in advanced if request.status is Status.FINISHED]
        self.scheduler.remove_finished(finished)
        for request in finished:
            del self.requests[request.request_id]
        self.stats.num_steps += 1
        self.stats.num_finished += len(finished)
        return advanced

    def _output(
        self, request: Request, tokens: list[int], from_drafts: int, reports: list[TokenLogprobs]
    ) -> StepOutput:
        output = StepOutput(request.request_id, tokens, [True] * from_drafts + [False] * (len(tokens) - from_drafts))
        if request.logprobs is not None:
            output.new_logprobs = [self._names.report(report) for report in reports]
            request.logprobs += output.new_logprobs
        if request.status is Status.FINISHED:
            output.finished = True
            output.finish_reason, output.stop_reason = request.finish_reason, request.stop_reason
        if request.stream_interval and request.is_due(len(tokens)):
            request.show()
            text = "" if request.detokenizer is None else request.detokenizer.take(output.finished)
            if text or output.finished or request.detokenizer is None:
                output.new_text = text
                request.told()
        return output
