"""Where a request ends: inside an accepted run the earliest boundary wins, and nothing behind it is kept or counted."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.engine import Engine, SamplingParams
from peagle.engine.request import Request
from peagle.target import Target
from tests.engine.helpers import ASCII, SEQUENCES, drain, greedy, make_engine, replay, run, tiny_head

PROMPT, WHICH, K = SEQUENCES[4], 4, 7


def answered(target: Target, answer: list[int], params: SamplingParams, k: int = K) -> tuple[Engine, Request, Any]:
    """One request whose drafts are all right, so that it runs in strides of K + 1 tokens."""
    engine = make_engine(target, tiny_head(target) if k else None, k)
    if k:
        replay(engine, {"0": PROMPT + answer})
    request = engine.add_request("0", PROMPT, params, stream_interval=1)
    outputs = drain(engine)
    assert engine.blocks.num_free == engine.blocks.num_blocks
    return engine, request, outputs


def first_of(answer: list[int], after: int) -> int:
    """An index at or behind `after` whose token does not occur before it."""
    return next(i for i in range(after, len(answer)) if answer[i] not in answer[:i])


def check_counts(engine: Engine, request: Request, outputs: Any, expected: list[int], text: str) -> None:
    assert request.output_token_ids == expected
    assert [token for output in outputs for token in output.new_token_ids] == expected
    assert engine.stats.num_output_tokens == len(expected)
    # one token of each step is the target's own, unless the end fell among the accepted drafts
    accepted = sum(sum(output.accepted_mask) for output in outputs)
    assert request.metrics.num_accepted_tokens == accepted == sum(request.metrics.accepted_per_pos)
    assert engine.text(request) == text == "".join(output.new_text or "" for output in outputs)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


@pytest.mark.parametrize("after", [0, 1, 3, 8, 9])
@pytest.mark.parametrize("how", ["eos", "stop_token_ids"])
def test_ending_token(
    target: Target, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch, how: str, after: int
) -> None:
    answer = plain[WHICH]
    end = first_of(answer, after)
    if how == "eos":
        monkeypatch.setattr(target, "eos_token_ids", frozenset((answer[end],)))
        params = SamplingParams(max_tokens=30, temperature=0)
    else:
        params = greedy(30, stop_token_ids=[answer[end]])
    engine, request, outputs = answered(target, answer, params)
    assert target.tokenizer is not None
    check_counts(engine, request, outputs, answer[: end + 1], target.tokenizer.decode(answer[:end]))
    assert request.finish_reason == "stop"
    assert request.stop_reason == (None if how == "eos" else answer[end])


def test_ignore_eos(target: Target, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = plain[WHICH]
    monkeypatch.setattr(target, "eos_token_ids", frozenset((answer[3],)))
    _, request, _ = answered(target, answer, greedy(20))
    assert (request.output_token_ids, request.finish_reason) == (answer[:20], "length")


@pytest.mark.parametrize("start", [0, 2, 5, 8, 13])
@pytest.mark.parametrize("length", [1, 3, 6])
@pytest.mark.parametrize("include", [False, True])
def test_stop_string(target: Target, plain: list[list[int]], start: int, length: int, include: bool) -> None:
    """A character a token: a stop string of several characters straddles tokens and steps."""
    answer = plain[WHICH]
    assert target.tokenizer is not None
    text = target.tokenizer.decode(answer[:30])
    stop = text[start : start + length]
    params = greedy(30, stop=["never there", stop], include_stop_str_in_output=include)
    engine, request, outputs = answered(target, answer, params)
    at = text.index(stop)
    shown = text[: at + length] if include else text[:at]
    check_counts(engine, request, outputs, answer[: at + length], shown)
    assert (request.finish_reason, request.stop_reason) == ("stop", stop)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 8, 9, 10, 17])
def test_max_tokens(target: Target, plain: list[list[int]], max_tokens: int) -> None:
    answer = plain[WHICH]
    engine, request, outputs = answered(target, answer, greedy(max_tokens))
    assert target.tokenizer is not None
    check_counts(engine, request, outputs, answer[:max_tokens], target.tokenizer.decode(answer[:max_tokens]))
    assert request.finish_reason == "length"
    # drafts that could not have been kept were not made
    assert request.metrics.num_draft_tokens == request.metrics.num_accepted_tokens


def test_earliest_of_several(target: Target, plain: list[list[int]]) -> None:
    """All boundaries within one accepted run; then a stop string and the last token allowed at the same place."""
    answer = plain[WHICH]
    assert target.tokenizer is not None
    text = target.tokenizer.decode(answer)
    end = first_of(answer, 4)
    late = text[end + 1 : end + 3]
    _, request, _ = answered(target, answer, greedy(8, stop=[late], stop_token_ids=[answer[end]]))
    assert (request.output_token_ids, request.stop_reason) == (answer[: end + 1], answer[end])
    at = text.index(text[2:5]) + 3
    _, request, _ = answered(target, answer, greedy(at, stop=[text[2:5]]))
    assert (request.output_token_ids, request.finish_reason) == (answer[:at], "stop")


def test_min_tokens(target: Target, plain: list[list[int]]) -> None:
    """Ending tokens are not chosen until so many tokens are there, with drafts exactly as without."""
    stops = sorted(set(plain[WHICH][:6]))
    params = greedy(30, min_tokens=9, stop_token_ids=stops)
    _, reference, _ = answered(target, [], params, k=0)
    output = reference.output_token_ids
    assert not set(output[:9]) & set(stops)
    assert len(output) > 9
    for wrong_after in (None, [0, 3, 7]):
        engine = make_engine(target, tiny_head(target), K)
        replay(engine, {"0": PROMPT + output}, wrong_after)
        (request,) = run(engine, [PROMPT], params)
        assert request.output_token_ids == output
    # a stop string does not end it either, before one token more; where it begins does not matter
    assert target.tokenizer is not None
    text = target.tokenizer.decode(plain[WHICH])
    _, request, _ = answered(target, plain[WHICH], greedy(20, min_tokens=6, stop=[text[4:6], text[2:4]]))
    again = [i for i in range(6, 20) if text[i - 1 : i + 1] in (text[4:6], text[2:4])]  # the last characters' places
    _, other, _ = answered(target, plain[WHICH], greedy(20, min_tokens=5, stop=[text[4:6]]))
    assert (len(other.output_token_ids), other.stop_reason) == (6, text[4:6])
    assert len(request.output_token_ids) == (again[0] + 1 if again else 20)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_one_request_at_the_models_length(target: Target, plain: list[list[int]], kind: str) -> None:
    """It drafts less and ends; the others go on drafting K."""
    k, length = 5, 50
    long, short = SEQUENCES[6], SEQUENCES[7]  # 40 and 7 tokens
    answers = {"0": long + plain[6], "1": short + plain[7]}
    engine = make_engine(target, tiny_head(target, kind), k, max_model_len=length, block_size=4)
    replay(engine, answers)
    first, second = run(engine, [long, short], greedy(31))
    assert first.token_ids == answers["0"][:length]
    assert second.token_ids == answers["1"][: 7 + 31]
    assert (first.finish_reason, second.finish_reason) == ("length", "length")
    assert first.metrics.drafts_per_pos == [2, 2, 1, 1, 1]  # 1 + 6 + 3 tokens
    assert second.metrics.drafts_per_pos == [5] * 5


def test_prompts_at_the_limits(target: Target) -> None:
    for prompt in (SEQUENCES[0], (SEQUENCES[6] * 2)[:47]):
        engine = make_engine(target, tiny_head(target), 3, max_model_len=48)
        (request,) = run(engine, [prompt], greedy(5))
        assert len(request.output_token_ids) == min(5, 48 - len(prompt))
        assert all(0 <= token < ASCII for token in request.output_token_ids)
