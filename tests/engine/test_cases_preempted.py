"""Requests that lose their blocks: what they drafted before is gone, and their output is what it would have been."""

from __future__ import annotations

import pytest

from peagle.engine.request import Request
from peagle.engine.scheduler import Schedule
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, assert_same, drain, greedy, make_engine, replay, run, tiny_head

K, ANSWER = 5, 40
KINDS = pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])


@KINDS
def test_no_stale_drafts_after_a_preemption(target: Target, plain: list[list[int]], kind: str) -> None:
    """Every draft is right where it was made, so a stale one would be found wrong; and a resumed request verifies none
    before it has chosen a token again."""
    engine = make_engine(target, tiny_head(target, kind), K, block_size=4, num_kv_blocks=40, max_model_len=96)
    replay(engine, {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))})
    schedule, resumed = engine.scheduler.schedule, set[Request]()

    def watched() -> Schedule:
        made = schedule()
        for request, drafts, samples in zip(made.requests, made.plan.num_drafts, made.plan.samples, strict=True):
            if request in resumed:
                assert drafts == 0
                if samples:
                    resumed.remove(request)
        resumed.update(made.preempted)
        return made

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    requests = run(engine, SEQUENCES, greedy(ANSWER))
    assert engine.stats.num_preemptions > 3
    for prompt, answer, request in zip(SEQUENCES, plain, requests, strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens > 0


@KINDS
def test_a_request_that_comes_again_starts_anew(target: Target, plain: list[list[int]], kind: str) -> None:
    """Aborted with drafts standing, then added again under its name: the same lane and blocks, nothing left in them."""
    engine = make_engine(
        target, tiny_head(target, kind), K, max_num_seqs=1, num_kv_blocks=8, enable_prefix_caching=False
    )
    replay(engine, {"0": SEQUENCES[4] + plain[4], "1": SEQUENCES[6] + plain[6]})
    for index in (0, 1, 0):
        name, which = str(index), (4, 6)[index]
        request = engine.add_request(name, SEQUENCES[which], greedy(ANSWER))
        while len(request.output_token_ids) < 10:
            engine.step()
        assert request.num_drafts > 0
        engine.abort(name)
    again = engine.add_request("0", SEQUENCES[4], greedy(ANSWER))
    drain(engine)
    assert_same(target, SEQUENCES[4], plain[4], again.output_token_ids)
    assert again.metrics.num_accepted_tokens == again.metrics.num_draft_tokens > 0


@KINDS
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_two_requests_that_each_fill_the_whole_cache(
    target: Target, plain: list[list[int]], kind: str, block_size: int
) -> None:
    """Lookahead slots included: near its length a request asks for no more than there is."""
    length = 48
    engine = make_engine(
        target,
        tiny_head(target, kind),
        K,
        block_size=block_size,
        num_kv_blocks=length // block_size,
        max_model_len=length,
        max_num_batched_tokens=16,
    )
    which = (4, 7)  # prompts of 17 and 7 tokens
    replay(engine, {str(i): SEQUENCES[w] + plain[w] for i, w in enumerate(which)}, [K, 0, 3])
    requests = run(engine, [SEQUENCES[w] for w in which], greedy(100))
    assert engine.stats.num_preemptions > 0
    for w, request in zip(which, requests, strict=True):
        assert len(request.token_ids) == length
        assert_same(target, SEQUENCES[w], plain[w][: length - len(SEQUENCES[w])], request.output_token_ids[:ANSWER])
