"""Which requests run in the next step, and with how many rows: continuous batching with chunked prefill.

There is no prefill phase and no decode phase: every request has tokens that are not computed yet, one when it decodes,
more in its prompt, and a step computes some of them for some requests within a budget of rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from peagle.engine.kv_cache import BlockManager, extend_keys
from peagle.engine.outputs import FinishReason
from peagle.engine.plan import LaneSetup, StepPlan
from peagle.engine.request import Request, Status

# Rows a step of all requests that ask for prompt_logprobs: a row needs the logits of the whole vocabulary, and memory
# is set aside only for rows that choose a token.
PROMPT_LOGPROB_ROWS = 256
MAX_TOP_K = 2**31 - 1  # more than any vocabulary; a lane keeps a machine integer
MAX_FACTOR = 1e30  # a lane keeps a float32: infinite temperatures and penalties make logits that are no numbers


@dataclass(slots=True)
class Schedule:
    """The requests of a step, in the order of the plan's lists, and those that had to give way to them.

    report_rows: how many rows requests that ask for prompt_logprobs may still run. cache_queries, cache_hits: tokens of
    requests that start, and how many of them the prefix cache had. ahead: it was planned before the step before it had
    a result, so that where its rows begin is filled in later.
    """

    requests: list[Request]
    plan: StepPlan
    preempted: list[Request]
    report_rows: int
    cache_queries: int = 0
    cache_hits: int = 0
    ahead: bool = False

    def without(self, lane: int) -> Request:
        """Take the request of a lane out, before the step has been started; returns it."""
        request = self.requests.pop(self.plan.lanes.index(lane))
        self.plan.remove(lane)
        return request


def lane_setup(request: Request) -> LaneSetup:
    params, bias = request.params, request.params.logit_bias or {}
    return LaneSetup(
        lane=request.lane,
        token_ids=request.token_ids,
        num_speculative_tokens=request.num_speculative_tokens,
        max_total_tokens=request.max_total_tokens,
        temperature=0.0 if params.greedy else min(params.temperature, MAX_FACTOR),
        top_k=min(max(params.top_k, 0), MAX_TOP_K),
        top_p=params.top_p,
        seed=request.seed,
        num_prompt=request.num_prompt,
        min_p=params.min_p,
        repetition_penalty=min(max(params.repetition_penalty, 1 / MAX_FACTOR), MAX_FACTOR),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=(tuple(bias), tuple(bias.values())),
        num_logprobs=request.num_logprobs,
        num_prompt_logprobs=request.num_prompt_logprobs,
        prompt_logprobs_from=len(request.prompt_logprobs or [None]),
        # the n-th output token (from 1) stands at position num_prompt + n - 1 and may stop from n = min_tokens on
        ban_until=request.num_prompt + params.min_tokens if params.min_tokens > 0 else 0,
        ban_ids=tuple(sorted(request.stop_ids)) if params.min_tokens > 0 else (),
    )


class Scheduler:
    """Requests run in order of arrival; when blocks run out the latest gives way and is computed again later, but for
    what the prefix cache still has of it."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        chunked_prefill: bool = True,
        num_steps: int = 1,
        prefix_caching: bool = False,
    ) -> None:
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.chunked_prefill = chunked_prefill
        self.prefix_caching = prefix_caching
        self.num_steps = num_steps  # decoding steps that one plan may run
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self._free_lanes = list(range(max_num_seqs - 1, -1, -1))

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def schedule(self) -> Schedule:
        """Plan one step: reserve every block that it can touch, lookahead included, and advance nothing yet."""
        schedule = Schedule([], StepPlan(), [], PROMPT_LOGPROB_ROWS)
        budget = self.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if request.waits_for_prompt_logprobs and schedule.report_rows == 0:
                index += 1
                continue
            if not self._reserve(request, schedule):
                break  # it gave way itself, and it was the last
            index += 1
            budget -= self._plan(request, schedule, budget, kept=len(self.running) - index)
        if not schedule.preempted:
            while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
                request = self.waiting[0]
                if request.waits_for_prompt_logprobs and schedule.report_rows == 0:
                    break
                cached = self._find_cached(request)
                uncached = len(request.token_ids) - len(cached) * self.blocks.block_size
                if not self.chunked_prefill and uncached > budget:
                    break
                if not self._admit(request, cached, schedule):
                    break
                budget -= self._plan(request, schedule, budget)
        return schedule

    def repeat(self, before: Schedule) -> Schedule | None:
        """The requests of `before`, which only decode and whose step has no result yet, once more.

        None when the next step might be another: requests came or went, or blocks or rows would run out.
        """
        requests = before.requests
        if requests != self.running or (self.waiting and len(self.running) < self.max_num_seqs):
            return None
        if sum(1 + request.num_speculative_tokens for request in requests) > self.max_num_batched_tokens:
            return None
        size = self.blocks.block_size
        needed = (-(-self._coverage(r, ahead=True) // size) - len(r.block_table) for r in requests)
        if sum(max(blocks, 0) for blocks in needed) > self.blocks.num_free:
            return None
        schedule = Schedule(list(requests), StepPlan(lanes=list(before.plan.lanes)), [], 0, ahead=True)
        for request in requests:
            self._grow(request, schedule, ahead=True)
        return schedule

    def catch_up(self, schedule: Schedule) -> None:
        """Fill in the rows of a schedule made ahead, once the step before it is known and has advanced its requests."""
        plan = schedule.plan
        plan.starts = [request.num_computed for request in schedule.requests]
        plan.num_drafts = [request.num_drafts for request in schedule.requests]
        plan.query_lens = [1 + request.num_drafts for request in schedule.requests]
        plan.samples = [True] * len(schedule.requests)

    def _plan(self, request: Request, schedule: Schedule, budget: int, kept: int = 0) -> int:
        """Enter a request's rows into the plan; returns how many. kept: rows of the budget that drafts leave to the
        requests behind, one each, so that nobody stands still beside others that draft."""
        plan = schedule.plan
        remaining = len(request.token_ids) - request.num_computed
        rows = min(remaining, budget)
        if request.waits_for_prompt_logprobs:
            rows = min(rows, schedule.report_rows)
            schedule.report_rows -= rows
        samples = rows == remaining
        drafts = min(request.num_drafts, max(budget - rows - kept, 0)) if samples else 0
        schedule.requests.append(request)
        plan.lanes.append(request.lane)
        plan.starts.append(request.num_computed)
        plan.query_lens.append(rows + drafts)
        plan.num_drafts.append(drafts)
        plan.samples.append(samples)
        return rows + drafts

    def _coverage(self, request: Request, ahead: bool = False) -> int:
        """How many positions the next step can touch, or with `ahead` the one after it.

        Verification reaches the last standing draft. The drafter's rows begin one position before the token that
        verification adds, so with all drafts accepted its K - 1 further rows (MTP slots, or EAGLE-3's own passes) end
        K - 1 positions behind that draft. Near its length limit a request drafts less and touches nothing beyond.
        Without drafts a plan may decode several tokens.
        """
        k = request.num_speculative_tokens
        lookahead = max(k, self.num_steps) - 1
        known = len(request.token_ids) + request.num_drafts
        if ahead:  # every draft may be accepted, and as many as possible follow
            known += self.num_steps + k
        return min(known + lookahead, request.max_total_tokens)

    def _find_cached(self, request: Request) -> list[int]:
        """Blocks that the request need not compute. What a prompt's logprobs are made of is in no cache."""
        if not self.prefix_caching or request.waits_for_prompt_logprobs:
            return []
        extend_keys(request.block_keys, request.token_ids, self.blocks.block_size, request.num_speculative_tokens > 0)
        return self.blocks.find(request.block_keys)

    def cache_computed(self, request: Request) -> None:
        """Enter into the prefix cache the blocks that a step has filled (see kv_cache)."""
        if not self.prefix_caching:
            return
        size = self.blocks.block_size
        # a run of accepted drafts that an end cut short was computed beyond the tokens that were kept
        full = min(request.num_computed, len(request.token_ids) - 1) // size
        if full <= request.num_keyed_blocks:
            return
        extend_keys(request.block_keys, request.token_ids, size, request.num_speculative_tokens > 0)
        for i in range(request.num_keyed_blocks, full):
            self.blocks.cache(request.block_table[i], request.block_keys[i])
        request.num_keyed_blocks = full

    def drafter_reached(self, request: Request, position: int) -> None:
        """The drafter has cached a request's positions up to this one, which must be computed."""
        size = self.blocks.block_size
        self.blocks.drafted.update(request.block_table[request.drafter_computed // size : position // size])
        request.drafter_computed = position

    def _grow(self, request: Request, schedule: Schedule, cached: Sequence[int] = (), ahead: bool = False) -> bool:
        known = len(request.block_table)
        added = self.blocks.grow(request.block_table, self._coverage(request, ahead), cached)
        if added is None:
            return False
        if added:
            schedule.plan.new_blocks.append((request.lane, known, added))
        return True

    def _reserve(self, request: Request, schedule: Schedule) -> bool:
        while not self._grow(request, schedule):
            victim = self.running[-1]
            self._preempt(victim)
            schedule.preempted.append(victim)
            if victim is request:
                return False
        return True

    def _admit(self, request: Request, cached: list[int], schedule: Schedule) -> bool:
        request.lane = self._free_lanes[-1]
        if not self._grow(request, schedule, cached):
            request.lane = -1
            return False
        self.waiting.popleft()
        self._free_lanes.pop()
        request.status = Status.RUNNING
        self.running.append(request)
        schedule.plan.setups.append(lane_setup(request))
        request.num_computed = len(cached) * self.blocks.block_size
        request.num_keyed_blocks = len(cached)
        has_rows = [block in self.blocks.drafted for block in cached]
        request.drafter_computed = [*has_rows, False].index(False) * self.blocks.block_size
        if request.num_cached_tokens < 0:  # one that was preempted finds its own blocks; that says nothing of prompts
            request.num_cached_tokens = request.num_computed
            if self.prefix_caching and not request.waits_for_prompt_logprobs:
                schedule.cache_queries += len(request.token_ids)
                schedule.cache_hits += request.num_computed
        return True

    def _preempt(self, request: Request) -> None:
        """Take a running request's blocks; it will be computed from the start, without the drafts that stood."""
        self.running.remove(request)
        self._vacate(request)
        request.num_computed = request.num_keyed_blocks = request.drafter_computed = 0
        request.num_drafts = 0
        request.num_preemptions += 1
        request.status = Status.WAITING
        self.waiting.appendleft(request)

    def _vacate(self, request: Request) -> None:
        self.blocks.release(request.block_table)
        self._free_lanes.append(request.lane)
        request.lane = -1

    def remove_finished(self, finished: list[Request]) -> None:
        """Free the blocks and lanes of requests that ended in this step."""
        for request in finished:
            self._vacate(request)
        if finished:
            self.running = [request for request in self.running if request.status is Status.RUNNING]

    def abort(self, request: Request, reason: FinishReason = "abort") -> None:
        """Drop a request in whatever state it is."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
            self._vacate(request)
        elif request.status is Status.WAITING:
            self.waiting.remove(request)
        request.finish(reason)
