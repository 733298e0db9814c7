"""Blocks and batches, without a model."""

from __future__ import annotations

import random

from peagle.engine.kv_cache import BlockManager
from peagle.engine.request import Request, Status
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.scheduler import Schedule, Scheduler


def make_request(name: str, prompt: int, max_tokens: int = 20, k: int = 0) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=list(range(prompt)),
        params=SamplingParams(max_tokens=max_tokens),
        max_total_tokens=prompt + max_tokens,
        num_speculative_tokens=k,
        eos_token_ids=frozenset(),
        seed=0,
    )


def advance(scheduler: Scheduler, schedule: Schedule, accept: random.Random | None = None) -> None:
    """What the engine does with a step, with some of the drafts accepted."""
    plan, finished = schedule.plan, []
    for i, request in enumerate(schedule.requests):
        request.num_computed = plan.starts[i] + plan.query_lens[i]
        if not plan.samples[i]:
            continue
        accepted = accept.randint(0, plan.num_drafts[i]) if accept else plan.num_drafts[i]
        request.num_computed += accepted - plan.num_drafts[i]
        request.append([1] * (accepted + 1))
        room = request.max_total_tokens - len(request.token_ids) - 1
        request.num_drafts = max(min(request.num_speculative_tokens, room), 0)
        if request.status is Status.FINISHED:
            finished.append(request)
    scheduler.remove_finished(finished)


def test_grow_is_all_or_nothing() -> None:
    blocks = BlockManager(4, 8)
    table: list[int] = []
    assert blocks.grow(table, 9) == table == [0, 1]
    assert blocks.grow(table, 16) == []
    other: list[int] = []
    assert blocks.grow(other, 17) is None
    assert (other, blocks.num_free, blocks.usage) == ([], 2, 0.5)
    assert blocks.grow(other, 16) == [2, 3]
    blocks.release(table)
    assert (table, blocks.num_free) == ([], 2)


def test_prompts_are_chunked_and_decoding_goes_first() -> None:
    scheduler = Scheduler(BlockManager(100, 4), max_num_seqs=3, max_num_batched_tokens=10)
    for name, prompt in (("a", 4), ("b", 13), ("c", 2), ("d", 2)):
        scheduler.add(make_request(name, prompt))
    seen = []
    for _ in range(3):
        schedule = scheduler.schedule()
        plan = schedule.plan
        assert sum(plan.query_lens) <= 10
        seen.append(
            [(r.request_id, n, s) for r, n, s in zip(schedule.requests, plan.query_lens, plan.samples, strict=True)]
        )
        advance(scheduler, schedule)
    assert seen[0] == [("a", 4, True), ("b", 6, False)]
    assert seen[1] == [("a", 1, True), ("b", 7, True), ("c", 2, True)]
    assert seen[2] == [("a", 1, True), ("b", 1, True), ("c", 1, True)]  # d has to wait for a lane


def test_without_chunked_prefill_a_prompt_runs_whole() -> None:
    scheduler = Scheduler(BlockManager(100, 4), 4, max_num_batched_tokens=16, chunked_prefill=False)
    for name, prompt in (("a", 10), ("b", 8), ("c", 3)):
        scheduler.add(make_request(name, prompt))
    schedule = scheduler.schedule()
    assert [r.request_id for r in schedule.requests] == ["a"]
    advance(scheduler, schedule)
    assert [r.request_id for r in scheduler.schedule().requests] == ["a", "b", "c"]


def test_drafts_are_cut_to_the_budget() -> None:
    scheduler = Scheduler(BlockManager(100, 4), 4, max_num_batched_tokens=6)
    for name in "ab":
        scheduler.add(make_request(name, 2, k=4))
    advance(scheduler, scheduler.schedule())
    plan = scheduler.schedule().plan
    assert plan.query_lens == [5, 1]
    assert plan.num_drafts == [4, 0]


def test_drafts_leave_a_row_to_each_request_behind() -> None:
    """Else the first requests' drafts would take every step's budget, and the last ones stand still till they end."""
    scheduler = Scheduler(BlockManager(100, 4), 4, max_num_batched_tokens=6)
    for name in "abc":
        scheduler.add(make_request(name, 2, k=4))
    advance(scheduler, scheduler.schedule())
    plan = scheduler.schedule().plan
    assert plan.num_drafts == [3, 0, 0]
    assert plan.query_lens == [4, 1, 1]


def test_lookahead_is_reserved_and_ends_at_the_limit() -> None:
    """Positions that a step can touch: the drafts that stand and K - 1 behind them."""
    blocks = BlockManager(100, 1)
    scheduler = Scheduler(blocks, 1, 100)
    request = make_request("a", 10, max_tokens=12, k=5)
    scheduler.add(request)
    schedule = scheduler.schedule()
    assert len(request.block_table) == 10 + 4
    advance(scheduler, schedule)
    schedule = scheduler.schedule()
    assert len(request.block_table) == 11 + 5 + 4
    advance(scheduler, schedule)
    assert request.num_drafts == 4  # 17 of 22 tokens are there
    scheduler.schedule()
    assert len(request.block_table) == 22


def test_the_latest_gives_way() -> None:
    blocks = BlockManager(9, 4)
    scheduler = Scheduler(blocks, 4, 100)
    first, second = make_request("a", 14, k=3), make_request("b", 10, k=3)
    scheduler.add(first)
    scheduler.add(second)
    preempted: list[Request] = []
    while not preempted:
        schedule = scheduler.schedule()
        preempted = schedule.preempted
        advance(scheduler, schedule)
    assert preempted == [second]
    assert (second.status, second.num_computed, second.num_drafts, second.lane) == (Status.WAITING, 0, 0, -1)
    assert second.block_table == []
    assert len(second.token_ids) > 10  # what was generated stays, and is computed again with the prompt
    while scheduler.has_unfinished:
        advance(scheduler, scheduler.schedule())
    assert len(first.token_ids) == 34
    assert len(second.token_ids) == 30
    assert blocks.num_free == 9


def test_random_traffic_keeps_its_accounts() -> None:
    """Requests of random sizes with random acceptance and aborts: no block is shared, lost or missing."""
    rng = random.Random(0)
    blocks = BlockManager(40, 4)
    scheduler = Scheduler(blocks, 5, 24)
    todo = [make_request(str(i), rng.randint(1, 60), rng.randint(1, 60), rng.choice((0, 1, 5))) for i in range(80)]
    alive: list[Request] = []
    steps = 0
    while todo or scheduler.has_unfinished:
        steps += 1
        assert steps < 5000
        while todo and rng.random() < 0.3:
            alive.append(todo.pop())
            scheduler.add(alive[-1])
        if alive and rng.random() < 0.05:
            victim = alive.pop(rng.randrange(len(alive)))
            if victim.status is not Status.FINISHED:
                scheduler.abort(victim)
        schedule = scheduler.schedule()
        plan = schedule.plan
        assert sum(plan.query_lens) <= 24
        lanes = [request.lane for request in scheduler.running]
        assert len(set(lanes)) == len(lanes) <= 5
        used = [block for request in scheduler.running for block in request.block_table]
        assert len(set(used)) == len(used) == 40 - blocks.num_free
        for request, start, rows, samples in zip(
            schedule.requests, plan.starts, plan.query_lens, plan.samples, strict=True
        ):
            touched = start + rows + (max(request.num_speculative_tokens - 1, 0) if samples else 0)
            assert len(request.block_table) * 4 >= min(touched, request.max_total_tokens)
        advance(scheduler, schedule, rng)
    assert blocks.num_free == 40
    assert sorted(scheduler._free_lanes) == list(range(5))
