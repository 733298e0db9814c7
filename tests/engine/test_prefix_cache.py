"""Prefix caching: nothing but speed may depend on it, the drafter's cache and its acceptance included."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from peagle.engine import LLM, Engine, SamplingParams
from peagle.engine.kv_cache import BlockManager, extend_keys
from peagle.engine.request import Request, Status
from peagle.engine.scheduler import Scheduler
from peagle.target import Target
from tests.engine.helpers import ASCII, SEQUENCES, drain, greedy, make_engine, replay, run, tiny_head
from tests.engine.test_scheduler import advance, make_request

BLOCK = 4
LONG = torch.randint(0, ASCII, (41,), generator=torch.Generator().manual_seed(3)).tolist()
KINDS = pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
DEPTHS = pytest.mark.parametrize("k", [1, 7])


def keys_of(tokens: list[int], drafts: bool = False) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, tokens, BLOCK, drafts)
    return keys


def test_keys_cover_the_token_behind_the_block_and_all_before() -> None:
    tokens = list(range(9))
    keys = keys_of(tokens)
    assert len(keys) == 2
    assert len(keys_of(tokens[:8])) == 1  # the token behind the second block is not known
    assert keys_of([*tokens[:8], 99])[0] == keys[0]
    assert keys_of([*tokens[:8], 99])[1] != keys[1]
    assert keys_of([99, *tokens[1:]])[1] != keys[1]
    assert keys_of(tokens, drafts=True)[0] != keys[0]
    grown = keys_of(tokens[:6])
    extend_keys(grown, tokens, BLOCK, False)
    assert grown == keys


def test_blocks_are_shared_and_the_least_recent_are_forgotten() -> None:
    blocks = BlockManager(5, BLOCK)
    keys = keys_of(list(range(13)))
    first: list[int] = []
    assert blocks.grow(first, 13) == [0, 1, 2, 3]
    for block, key in zip(first, keys, strict=False):
        blocks.cache(block, key)
    blocks.cache(4, keys[0])  # the same content again: the first stays
    assert blocks.find(keys) == [0, 1, 2]
    assert blocks.find(keys[1:]) == [1, 2]

    second: list[int] = []
    assert blocks.grow(second, 12, blocks.find(keys[:2])) == [0, 1, 4]
    assert blocks.num_free == 0
    third: list[int] = []
    assert blocks.grow(third, 16, blocks.find(keys)) is None
    assert third == []
    blocks.release(first)
    assert blocks.num_free == 2  # blocks 0 and 1 stand in the second table
    assert blocks.find(keys) == [0, 1, 2]
    blocks.release(second)
    assert (blocks.num_free, blocks.usage, blocks.num_cached) == (5, 0.0, 3)

    # the two that hold nothing go first, then the end of the prefix before its beginning
    assert blocks.grow(third, 3 * BLOCK) == [3, 4, 2]
    assert blocks.find(keys) == [0, 1]
    # what is free already only because it is cached cannot be counted twice
    assert blocks.grow([], 3 * BLOCK, [0, 1]) is None
    other: list[int] = []
    assert blocks.grow(other, 2 * BLOCK, [0, 1]) == [0, 1]
    blocks.release(third)
    blocks.release(other)
    assert blocks.num_free == 5


def drafter_states(engine: Engine, table: list[int], positions: int) -> list[Tensor]:
    assert engine.runner.draft_pass is not None
    pools = [pool for layer in engine.runner.draft_pass.kv_cache for pool in layer]
    return [pool[torch.tensor(table)].flatten(0, 1)[:positions].clone() for pool in pools]


def prefill(engine: Engine, prompt: list[int], name: str = "0") -> tuple[Request, list[Tensor]]:
    """Run a request until its prompt is done; it and the drafter's states of the prompt."""
    request = engine.add_request(name, prompt, greedy(20))
    while len(request.token_ids) == len(prompt):
        engine.step()
    return request, drafter_states(engine, request.block_table, len(prompt))


def assert_same_states(ours: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(ours, expected, strict=True):
        assert b.abs().sum() > 0
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@KINDS
@DEPTHS
@pytest.mark.parametrize("batched_tokens", [5, 1024])
def test_a_hit_is_like_a_miss(target: Target, kind: str, k: int, batched_tokens: int) -> None:
    """Another end, behind a boundary and inside a block, and the very same prompt again."""
    drafter = tiny_head(target, kind)
    prompts = [
        (LONG, 0),
        (LONG, 40),  # all but its last token
        ([*LONG[:20], (LONG[20] + 1) % ASCII, *LONG[21:]], 16),  # differs right behind the fifth block: not reused
        ([*LONG[:21], (LONG[21] + 1) % ASCII, *LONG[22:]], 20),
        (LONG[:20], 16),
        (LONG[:21], 20),
        ([*LONG[1:]], 0),
    ]
    engine = make_engine(target, drafter, k, block_size=BLOCK, max_num_batched_tokens=batched_tokens)
    hits = 0
    for i, (prompt, cached) in enumerate(prompts):
        request, states = prefill(engine, prompt, str(i))
        off = make_engine(
            target, drafter, k, block_size=BLOCK, max_num_batched_tokens=batched_tokens, enable_prefix_caching=False
        )
        fresh, expected = prefill(off, prompt)
        assert request.num_cached_tokens == cached
        assert fresh.num_cached_tokens == 0
        assert_same_states(states, expected)
        drain(engine)
        drain(off)
        assert request.token_ids == fresh.token_ids
        assert request.metrics == fresh.metrics
        hits += cached
        assert engine.stats.prefix_cache_hits == hits
        assert off.stats.prefix_cache_queries == 0
    assert engine.stats.prefix_cache_queries == sum(len(prompt) for prompt, _ in prompts)
    assert engine.blocks.num_free == engine.blocks.num_blocks


@KINDS
@DEPTHS
def test_a_conversation_grows(target: Target, plain: list[list[int]], kind: str, k: int) -> None:
    """Blocks that decoding filled, by accepted and rejected drafts, are as good as those of a prompt."""
    drafter = tiny_head(target, kind)
    engine = make_engine(target, drafter, k, block_size=BLOCK)
    prompt = SEQUENCES[5]
    replay(engine, {"0": prompt + plain[5]}, [k, 0, 1, k, 2, 3])
    first = engine.add_request("0", prompt, greedy(25))
    drain(engine)
    assert first.metrics.num_accepted_tokens > 5
    turn = [*first.token_ids, 3, 1, 4]
    del engine.runner.lanes.store_drafts  # from here on the head's own drafts
    request, states = prefill(engine, turn, "1")
    # positions up to the one before the last token of the answer were computed
    assert request.num_cached_tokens == (len(first.token_ids) - 1) // BLOCK * BLOCK
    off = make_engine(target, drafter, k, block_size=BLOCK, enable_prefix_caching=False)
    fresh, expected = prefill(off, turn)
    assert_same_states(states, expected)
    drain(engine)
    drain(off)
    assert request.token_ids == fresh.token_ids
    assert request.metrics == fresh.metrics


def test_a_run_that_an_end_cuts_short_is_not_cached_beyond_it(target: Target, plain: list[list[int]]) -> None:
    engine = make_engine(target, tiny_head(target), 7, block_size=1)
    replay(engine, {"0": SEQUENCES[3] + plain[3]})
    stop = plain[3][3]
    end = plain[3].index(stop) + 1
    (request,) = run(engine, [SEQUENCES[3]], greedy(30, stop_token_ids=[stop]))
    assert request.output_token_ids == plain[3][:end]
    assert engine.blocks.num_cached == len(request.token_ids) - 1


@KINDS
def test_under_pressure(target: Target, plain: list[list[int]], kind: str) -> None:
    """More prefixes than blocks, preemption among them: what was forgotten is computed again."""
    engine = make_engine(target, tiny_head(target, kind), 3, block_size=2, num_kv_blocks=66)
    for order in ((0, 1, 2, 3, 4, 5, 6, 7), (6, 5), (7, 6, 5, 4, 3, 2, 1, 0), (5,)):
        requests = run(engine, [SEQUENCES[i] for i in order], greedy(20))
        for i, request in zip(order, requests, strict=True):
            assert request.output_token_ids == plain[i][:20]
    assert engine.stats.num_preemptions > 0
    assert engine.stats.prefix_cache_hits > 0
    assert engine.blocks.num_cached <= 66


def test_a_preempted_request_finds_its_own_blocks(target: Target) -> None:
    engine = make_engine(target, tiny_head(target), 3, block_size=BLOCK)
    alone = run(make_engine(target), [LONG], greedy(20))[0].output_token_ids
    request = engine.add_request("0", LONG, greedy(20))
    while len(request.output_token_ids) < 9:
        engine.step()
    computed = request.num_computed
    engine.scheduler._preempt(request)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    engine.step()
    assert request.num_computed >= computed
    assert engine.stats.prefix_cache_hits == 0  # not a prompt's hit
    drain(engine)
    assert request.output_token_ids == alone
    assert request.num_cached_tokens == 0


def test_aborts_give_shared_blocks_back(target: Target) -> None:
    engine = make_engine(target, tiny_head(target), 3, block_size=BLOCK, max_num_batched_tokens=16)
    run(engine, [LONG], greedy(4))
    requests = [engine.add_request(str(i), LONG, greedy(20)) for i in range(4)]
    engine.step()
    assert all(request.num_cached_tokens == 40 for request in requests)
    assert engine.blocks.num_blocks - engine.blocks.num_free < 4 * len(requests[0].block_table)
    for i in (2, 0):
        assert engine.abort(str(i))
        engine.step()
    drain(engine)
    assert requests[1].token_ids == requests[3].token_ids == run(make_engine(target), [LONG], greedy(20))[0].token_ids
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not any(engine.blocks._references)


def test_requests_that_do_not_draft_leave_nothing_for_those_that_do(target: Target) -> None:
    drafter = tiny_head(target)
    engine = make_engine(target, drafter, 4, block_size=BLOCK)
    run(engine, [LONG], greedy(4, num_speculative_tokens=0))
    request, states = prefill(engine, LONG)
    assert request.num_cached_tokens == 0
    fresh, expected = prefill(make_engine(target, drafter, 4, block_size=BLOCK), LONG)
    assert_same_states(states, expected)
    drain(engine)
    again = run(engine, [LONG], greedy(4, num_speculative_tokens=0))[0]
    assert again.num_cached_tokens == 40
    assert again.output_token_ids == fresh.token_ids[41:] + request.token_ids[41 + len(fresh.token_ids[41:]) : 45]


def test_prompt_logprobs_are_computed_and_not_cached(target: Target) -> None:
    llm = LLM(target, max_model_len=128, block_size=BLOCK)
    params = SamplingParams(max_tokens=3, temperature=0.0)
    prompt = {"prompt_token_ids": LONG}
    first = llm.generate(prompt, params, use_tqdm=False)[0]
    asks = llm.generate(prompt, SamplingParams(max_tokens=3, temperature=0.0, prompt_logprobs=0), use_tqdm=False)[0]
    again = llm.generate(prompt, params, use_tqdm=False)[0]
    assert (first.num_cached_tokens, asks.num_cached_tokens, again.num_cached_tokens) == (0, 0, 40)
    assert asks.prompt_logprobs is not None
    assert len(asks.prompt_logprobs) == len(LONG)
    assert first.outputs == asks.outputs == again.outputs
    assert (llm.stats.prefix_cache_queries, llm.stats.prefix_cache_hits) == (82, 40)


def test_several_steps_a_plan(target: Target) -> None:
    engine = make_engine(target, None, 0, block_size=BLOCK, num_scheduler_steps=4)
    first, second = (run(engine, [LONG], greedy(15))[0] for _ in range(2))
    longer = run(engine, [first.token_ids], greedy(5))[0]
    assert first.token_ids == second.token_ids
    assert (second.num_cached_tokens, longer.num_cached_tokens) == (40, 52)
    whole = run(make_engine(target), [LONG], greedy(20))[0]
    assert longer.token_ids == whole.token_ids


def test_random_traffic_keeps_its_accounts() -> None:
    """Requests with common beginnings, aborts and preemption: a block in use is written by one request only."""
    rng = random.Random(1)
    blocks = BlockManager(40, BLOCK)
    scheduler = Scheduler(blocks, 5, 24, prefix_caching=True)
    todo = [make_request(str(i), rng.randint(1, 60), rng.randint(1, 60), rng.choice((0, 1, 5))) for i in range(80)]
    alive: list[Request] = []
    hits = preempted = steps = 0
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
        hits += schedule.cache_hits
        preempted += len(schedule.preempted)
        tables = [request.block_table for request in scheduler.running]
        used = [block for table in tables for block in table]
        assert len(set(used)) == 40 - blocks.num_free
        assert [used.count(block) for block in range(40)] == blocks._references
        for request, start in zip(schedule.requests, schedule.plan.starts, strict=True):
            assert start < len(request.token_ids)
            for block in request.block_table[start // BLOCK :]:  # written by this step or later
                assert blocks._references[block] == 1
                assert blocks._key_of[block] is None
        running = list(schedule.requests)
        advance_and_cache(scheduler, schedule, rng)
        for request in running:
            for i in range(request.num_keyed_blocks if request.block_table else 0):
                assert (i + 1) * BLOCK <= request.num_computed
    assert hits > 100
    assert preempted > 0
    assert blocks.num_free == 40
    assert not any(blocks._references)
    assert sorted(scheduler._free_lanes) == list(range(5))


def advance_and_cache(scheduler: Scheduler, schedule: object, rng: random.Random) -> None:
    """What the engine does: blocks are cached before a finished request gives them back."""
    remove = scheduler.remove_finished

    def cached_first(finished: list[Request]) -> None:
        for request in schedule.requests:  # type: ignore[attr-defined]
            scheduler.cache_computed(request)
        remove(finished)

    scheduler.remove_finished = cached_first  # type: ignore[method-assign]
    try:
        advance(scheduler, schedule, rng)  # type: ignore[arg-type]
    finally:
        del scheduler.remove_finished
