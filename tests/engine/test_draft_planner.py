"""The number of drafts changes from step to step: output, drafts and the drafter's cache are as if it had not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.config.engine import EngineConfig
from peagle.drafter import Drafter
from peagle.engine import LLM, Engine, SamplingParams, draft_planner
from peagle.engine.checks import make_planner
from peagle.engine.draft_length import DraftLength
from peagle.engine.draft_planner import DraftPlanner, steady_drafts
from peagle.engine.memory import bytes_per_block
from peagle.engine.plan import DraftingPlan, StepPlan, StepResult
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, assert_same, drain, greedy, make_engine, replay, run, tiny_head
from tests.engine.test_cases_acceptance import narrow, prompts  # noqa: F401  (fixtures)

K = 3
KINDS = pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
generator = torch.Generator().manual_seed(11)
PATTERNS = {
    "off and on": [0, K],
    "down and up": [3, 2, 1, 0, 1, 2],
    "long off": [K] * 4 + [0] * 9,
    "any": torch.randint(0, K + 1, (64,), generator=generator).tolist(),
}


def changing(engine: Engine, pattern: Sequence[int], scout_every: int = 0) -> list[int]:
    """Let the engine draft as many as the pattern says, one number a step, over and over; returns those used so far."""
    planner, used = engine.draft_planner, []
    assert planner is not None
    numbers: Iterator[int] = cycle(pattern)

    def choose(num_requests: int) -> int:
        used.append(next(numbers))
        return used[-1]

    planner._choose = choose  # type: ignore[method-assign]
    planner._scouts = lambda *_: scout_every > 0 and len(used) % scout_every == 0  # type: ignore[method-assign]
    planner._joins = lambda *_: True  # type: ignore[method-assign]
    return used


def changing_engine(target: Target, drafter: Drafter, pattern: Sequence[int], scout: int = 0, **config: Any) -> Engine:
    engine = make_engine(target, drafter, K, dynamic_speculation=True, **config)
    changing(engine, pattern, scout)
    return engine


@KINDS
@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS.keys())
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"block_size": 1, "max_num_batched_tokens": 7},  # prompts in chunks beside those that decode
        {"block_size": 4, "max_num_seqs": 3},  # they come as others leave
        {"block_size": 4, "num_kv_blocks": 40, "max_model_len": 96},  # some lose their blocks
    ],
    ids=["all", "chunks", "queue", "preempted"],
)
def test_greedy_output_is_that_of_plain_decoding(
    target: Target, plain: list[list[int]], kind: str, pattern: list[int], config: dict[str, Any]
) -> None:
    """With drafts that are right for 0 to K tokens in turn, and requests that end at different times."""
    engine = changing_engine(target, tiny_head(target, kind), pattern, scout=5, **config)
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    replay(engine, known, [3, 0, 2, 1, 3])
    lengths = [40, 3, 40, 17, 1, 40, 29, 12]
    own = [None, None, 0, None, 1, None, 2, None]  # some want fewer drafts, or none
    params = [greedy(n, num_speculative_tokens=k) for n, k in zip(lengths, own, strict=True)]
    for prompt, answer, length, request in zip(SEQUENCES, plain, lengths, run(engine, SEQUENCES, params), strict=True):
        assert_same(target, prompt, answer[:length], request.output_token_ids)
    assert engine.stats.spec.num_accepted_tokens > 0
    if "num_kv_blocks" in config:
        assert engine.stats.num_preemptions > 0


@KINDS
def test_at_the_length_limit(target: Target, plain: list[list[int]], kind: str) -> None:
    """Where prompt and answer fill max_model_len, with every k at every distance from it."""
    prompt, answer = SEQUENCES[4], plain[4]
    for shift in range(6):
        engine = changing_engine(
            target, tiny_head(target, kind), [*[0, 3, 1][shift % 3 :], 2, 3, 0], max_model_len=17 + 20 + shift % 2
        )
        replay(engine, {"0": prompt + answer})
        (request,) = run(engine, [prompt], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
        assert_same(target, prompt, answer[: 20 + shift % 2], request.output_token_ids)


def drafts_of(engine: Engine, several: list[list[int]], length: int = 30) -> dict[tuple[str, int], list[int]]:
    """What the head drafts behind each position of each request."""
    lanes, found = engine.runner.lanes, {}
    store = lanes.store_drafts

    def noted(drafts: Tensor, num_drafts: Tensor, lane_offset: Tensor, next_position: Tensor) -> None:
        by_lane = {request.lane: request for request in engine.scheduler.running}
        for r, count in enumerate(num_drafts.tolist()):
            if count:
                request = by_lane[int(lane_offset[r]) // lanes.width]
                found[request.request_id, int(next_position[r])] = drafts[r, :count].tolist()
        store(drafts, num_drafts, lane_offset, next_position)

    lanes.store_drafts = noted  # type: ignore[method-assign]
    run(engine, several, greedy(length))
    lanes.store_drafts = store  # type: ignore[method-assign]
    return found


@KINDS
@pytest.mark.parametrize("make_up_rows", [256, 5])
@pytest.mark.parametrize(
    "config", [{}, {"block_size": 4, "max_num_batched_tokens": 9}, {"enable_prefix_caching": False}]
)
def test_drafts_after_a_pause_are_those_without_one(
    narrow: Target,  # noqa: F811
    prompts: list[list[int]],  # noqa: F811
    kind: str,
    make_up_rows: int,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So acceptance is too: the drafter's cache holds the rows that were put off, even when it makes up few a step."""
    monkeypatch.setattr(draft_planner, "MAKE_UP_ROWS", make_up_rows)
    drafter = tiny_head(narrow, kind)
    always = drafts_of(make_engine(narrow, drafter, 1), prompts)
    always_k = drafts_of(make_engine(narrow, drafter, K), prompts)
    for pattern in ([0] * 8 + [1] * 100, [1] * 4 + [0] * 7 + [1] * 5):
        engine = changing_engine(narrow, drafter, pattern, **config)
        found = drafts_of(engine, prompts)
        assert len(found) > (20 if make_up_rows > 5 else 8)
        for place, drafts in found.items():
            if place in always:
                assert drafts == always[place], place
        again = drafts_of(engine, prompts)  # the prefix cache has blocks with and without drafter rows
        assert len(again) > 8
        for place, drafts in again.items():
            if place in always:
                assert drafts == always[place], place
    changed = drafts_of(changing_engine(narrow, drafter, [0] * 5 + [K] * 4, scout=4), prompts)
    common = [place for place in changed if place in always_k]
    assert len(common) > 5
    for place in common:
        assert changed[place] == always_k[place][: len(changed[place])], place


def test_the_right_blocks_are_known_to_lack_drafter_rows(target: Target) -> None:
    engine = changing_engine(target, tiny_head(target), [0], block_size=4)
    prompt = SEQUENCES[6]  # 40 tokens
    run(engine, [prompt], greedy(8))
    assert engine.blocks.num_cached == 11
    assert not engine.blocks.drafted
    used = changing(engine, [K])
    request = engine.add_request("hit", prompt, greedy(8))
    engine.step()
    assert request.num_cached_tokens == 36
    assert request.drafter_computed == 40  # all made up, in the step that ran the rest of the prompt
    drain(engine)
    assert len(engine.blocks.drafted & set(engine.blocks._block_of.values())) == 9  # two more were computed anew
    again = engine.add_request("again", prompt, greedy(1))
    assert used
    engine.scheduler.schedule()
    assert again.drafter_computed == again.num_computed == 36
    engine.abort("again")


def test_a_pause_costs_no_drafter_pass(target: Target) -> None:
    engine = changing_engine(target, tiny_head(target), [0])
    assert engine.runner.draft_pass is not None
    engine.runner.draft_pass._forward = None  # type: ignore[assignment]
    run(engine, SEQUENCES[:3], greedy(6))
    assert engine.stats.spec.num_drafts == 0


@KINDS
def test_sampled_tokens_are_those_of_plain_decoding(target: Target, kind: str) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=t, top_p=p, seed=i, ignore_eos=True)
        for i, (t, p) in enumerate([(1.0, 1.0), (0.7, 0.9), (2.0, 1.0), (0.0, 1.0)])
    ]
    expected = [r.output_token_ids for r in run(make_engine(target), SEQUENCES[:4], params)]
    engine = changing_engine(target, tiny_head(target, kind), PATTERNS["any"], scout=3)
    assert [r.output_token_ids for r in run(engine, SEQUENCES[:4], params)] == expected


def drafts_by_batch(engine: Engine, counts: Sequence[int]) -> dict[int, int]:
    """Drafts that a request has standing once so many run."""
    found = {}
    for count in counts:
        requests = [engine.add_request(f"{count}-{i}", SEQUENCES[2], greedy(40)) for i in range(count)]
        engine.step()
        found[count] = requests[0].num_drafts
        assert {request.num_drafts for request in requests} == {found[count]}
        for request in requests:
            engine.abort(request.request_id)
    return found


def test_a_table_says_how_many(target: Target) -> None:
    table = ((1, 2, 3), (4, 5, 1), (6, 7, 0))
    engine = Engine(target, tiny_head(target), K, EngineConfig(max_num_seqs=8, max_model_len=128), None, table)
    assert drafts_by_batch(engine, range(1, 9)) == {1: 3, 2: 3, 3: 3, 4: 1, 5: 1, 6: 0, 7: 0, 8: 0}


def test_a_table_and_plain_decoding_agree(target: Target, plain: list[list[int]]) -> None:
    table = ((1, 2, 3), (3, 5, 1), (6, 8, 0))
    engine = Engine(target, tiny_head(target), K, EngineConfig(max_num_seqs=8, max_model_len=128), None, table)
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    replay(engine, known, [3, 0, 2, 1])
    lengths = [40, 3, 12, 17, 1, 9, 20, 12]
    requests = run(engine, SEQUENCES, [greedy(n) for n in lengths])
    for prompt, answer, length, request in zip(SEQUENCES, plain, lengths, requests, strict=True):
        assert_same(target, prompt, answer[:length], request.output_token_ids)
    assert len(engine.stats.spec.drafts_per_pos) == K


def test_the_number_is_fixed_unless_asked_otherwise(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert make_engine(target, tiny_head(target), K).draft_planner is None
    assert LLM(target, max_model_len=64).engine.draft_planner is None
    assert make_engine(target, dynamic_speculation=True).draft_planner is None  # nothing to choose


CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_where_it_can_be_chosen() -> None:
    def length(device: torch.device, dynamic: bool | None, synthetic: bool = False) -> bool:
        planner = make_planner(EngineConfig(dynamic_speculation=dynamic), device, K, None, synthetic)
        return planner is not None and planner.length is not None

    assert length(CPU, True)
    assert length(CPU, None)
    assert not length(CPU, False)
    assert not length(GPU, None)  # captured steps have fixed shapes
    assert not length(CPU, None, synthetic=True)
    with pytest.raises(InputError, match="dynamic_speculation: got True on cuda"):
        length(GPU, True)
    with pytest.raises(InputError, match="dynamic_speculation: got True with synthetic acceptance"):
        length(CPU, True, synthetic=True)
    with pytest.raises(InputError, match="dynamic_speculation: got 3"):
        EngineConfig(dynamic_speculation=3)  # type: ignore[arg-type]


def test_where_a_table_can_be_used() -> None:
    table = ((1, 4, 2),)

    def planner(device: torch.device, k: int = K, **config: Any) -> DraftPlanner | None:
        return make_planner(EngineConfig(**config), device, k, table, False)

    for found in (planner(CPU), planner(CPU, dynamic_speculation=None), planner(GPU, enforce_eager=True)):
        assert found is not None
        assert found.table == table
    with pytest.raises(InputError, match=r"num_speculative_tokens_per_batch_size: .*enforce_eager"):
        planner(GPU)
    with pytest.raises(InputError, match="one of the two"):
        planner(CPU, dynamic_speculation=True)
    with pytest.raises(InputError, match="without a drafter"):
        planner(CPU, k=0)


def test_the_states_that_are_kept_count_as_memory(target: Target) -> None:
    drafter = tiny_head(target)
    without, kept = (bytes_per_block(target, drafter, 16, torch.float32, late) for late in (False, True))
    assert kept - without == 16 * 4 * drafter.config.aux_size
    assert bytes_per_block(target, None, 16, torch.float32, True) == bytes_per_block(target, None, 16, torch.float32)


@KINDS
def test_it_learns_while_it_runs(target: Target, plain: list[list[int]], kind: str) -> None:
    """From nothing: both ends are tried, costs and rates are filled in, and the output is right all the while."""
    engine = make_engine(target, tiny_head(target, kind), K, dynamic_speculation=True)
    assert engine.draft_planner is not None
    assert (length := engine.draft_planner.length) is not None
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(40)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)
    assert length.costs.numbers
    assert length.rates[0] < 0.6  # a random head
    assert length.steps == engine.stats.num_steps


def test_steps_are_timed_at_the_start(target: Target) -> None:
    engine = make_engine(target, tiny_head(target), K, dynamic_speculation=True, seed=3)
    engine.capture()
    assert engine.draft_planner is not None
    assert (length := engine.draft_planner.length) is not None
    assert length.costs.numbers == [1, 4]
    assert length.make_up_seconds > 0
    assert length.rates == [0.6] * K
    assert engine.draft_planner.held is None
    assert not engine.requests
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert engine.stats == make_engine(target).stats
    params = SamplingParams(max_tokens=8, temperature=1.0)  # requests get the seeds that they would have had
    ids = [run(e, [SEQUENCES[1]], params)[0].output_token_ids for e in (engine, make_engine(target, seed=3))]
    assert ids[0] == ids[1]


def request(behind: int, k: int = K) -> Request:
    made = Request("r", [1] * 100, greedy(10), 110, k, frozenset(), 0)
    made.num_computed, made.drafter_computed = 99, 99 - behind
    return made


def decoding(requests: list[Request]) -> StepPlan:
    n = len(requests)
    return StepPlan(lanes=list(range(n)), starts=[99] * n, query_lens=[1] * n, num_drafts=[0] * n, samples=[True] * n)


def test_those_with_little_to_make_up_draft_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_planner, "MAKE_UP_ROWS", 10)
    planner = DraftPlanner(table=((1, 9, 2),))
    requests = [request(8), request(0), request(5, k=1), request(0, k=0), request(9)]
    plan = decoding(requests)
    planner.plan(requests, plan)
    assert plan.drafting == DraftingPlan(
        wanted=[0, 2, 1, 0, 0],
        runs=[False, True, True, False, False],
        first=[91, 99, 94, 99, 90],
        make_up=[5, 0, 5, 0, 0],
    )


def test_a_scout_is_one_request_that_drafts_all_it_may() -> None:
    length = DraftLength(K)
    length.costs.add(1, {0: 1.0, K: 9.0})
    length._scout_seconds = length.steps = 1000
    planner = DraftPlanner(length=length)
    requests = [request(4), request(2), request(0, k=0)]
    plan = decoding(requests)
    planner.plan(requests, plan)
    assert plan.drafting is not None
    assert (plan.drafting.wanted, plan.drafting.make_up) == ([0, K, 0], [0, 2, 0])
    planner.plan(requests, plan)  # the next one is some steps off
    assert plan.drafting.wanted == [0, 0, 0]


def test_who_drafts_when_it_pays() -> None:
    length = DraftLength(K)
    length.costs.add(1, {0: 1.0, K: 1.3})
    length.make_up_seconds = 0.1
    planner = DraftPlanner(length=length)
    new = request(99)  # as one whose prompt has not run
    new.num_computed = 0
    requests = [request(0), request(1), request(60), new]
    plan = decoding(requests)
    plan.starts[3], plan.query_lens[3], plan.samples[3] = 0, 50, False
    planner.plan(requests, plan)
    assert plan.drafting is not None
    assert plan.drafting.runs == [True, True, False, False]
    length.make_up_seconds = 0.0001
    planner.plan(requests, plan)
    assert plan.drafting.runs == [True] * 4


def test_only_steady_steps_are_timed() -> None:
    def k(wanted: list[int], drafts: list[int], prompt_rows: int = 0) -> float | None:
        n = len(wanted)
        plan = StepPlan(
            lanes=list(range(n)),
            query_lens=[1 + d + prompt_rows for d in drafts],
            num_drafts=drafts,
            samples=[True] * n,
            drafting=DraftingPlan(wanted, [w > 0 for w in wanted], [0] * n, [0] * n),
        )
        return steady_drafts(plan)

    assert k([0, 0], [0, 0]) == 0
    assert k([2] * 20, [2] * 19 + [0]) == 1.95  # one of many has no room left
    assert k([3, 0], [3, 0]) == 1.5  # one of two drafts
    assert k([2, 2], [2, 0]) is None
    assert k([3, 3], [2, 2]) is None
    assert k([0, 0], [3, 3]) is None
    assert k([2, 2], [2, 2], prompt_rows=5) is None


def test_what_is_learned_from_a_step() -> None:
    length = DraftLength(K)
    planner = DraftPlanner(length=length)
    requests = [request(20), request(0)]
    plan = decoding(requests)
    planner.plan(requests, plan)  # nothing is known: K for all
    planner.observe(plan, StepResult([[1], [1]], [0, 0], [K, K], make_up_seconds=0.4), 1.0)
    assert length.make_up_seconds == pytest.approx(0.02)
    assert length.costs.untried() == K
    plan.num_drafts, plan.query_lens = [K, K], [1 + K] * 2
    requests[0].drafter_computed = 99
    planner.plan(requests, plan)
    planner.observe(plan, StepResult([[1] * 4, [1]], [3, 0], [K, K]), 2.0)
    assert length.costs.untried() == 0
    assert length.rates[0] == pytest.approx(0.6, abs=0.1)
    assert length.rates[1] > 0.6
