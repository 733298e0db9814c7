"""Where an answer ends inside an accepted run: text, token ids, logprobs and usage agree, whole and streamed, and
nothing behind the end is sent or counted."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from peagle.config.engine import EngineConfig
from peagle.engine.engine import Engine
from peagle.engine.sampling_params import SamplingParams
from peagle.target import Target
from tests.engine.helpers import replay, tiny_head
from tests.server.conftest import MODEL, Running, Start
from tests.server.test_metrics import scrape

K = 7
PROMPT = [30, 40, 50, 60, 35]


@pytest.fixture(scope="module")
def answer(alone: Callable[[list[int], SamplingParams], tuple[str, list[int], str]]) -> list[int]:
    """The 60 tokens that follow PROMPT; one token is one character."""
    return alone(PROMPT, SamplingParams(max_tokens=60, temperature=0, ignore_eos=True))[1]


@pytest.fixture(scope="module")
def right(start: Start, target: Target, answer: list[int]) -> Running:
    """A server whose drafts are all right, so that it answers PROMPT in strides of K + 1 tokens."""
    engine = Engine(target, tiny_head(target), K, EngineConfig(max_num_seqs=1, max_model_len=128, num_kv_blocks=16))
    known = PROMPT + answer

    class Everybody(dict[str, list[int]]):
        def __missing__(self, name: str) -> list[int]:
            return known

    replay(engine, Everybody())
    return start(engine)


def text_of(ids: list[int]) -> str:
    return "".join(chr(33 + token) for token in ids)


def ask(server: Running, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """One choice and its usage, put together from chunks if streamed."""
    body = {
        "prompt": PROMPT,
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
        "return_spec_metrics": True,
    } | body
    if not stream:
        got = server.post("/v1/completions", body).json()
        return got["choices"][0] | {"usage": got["usage"], "ended": 1}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    events = [line[6:] for line in server.post("/v1/completions", body).text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    parts = [json.loads(event) for event in events]
    whole: dict[str, Any] = {"text": "", "token_ids": [], "ended": 0, "usage": parts.pop()["usage"]}
    tokens: list[str] = []
    for part in parts:
        choice = part["choices"][0]
        assert not whole["ended"], "something came behind the end"
        whole["text"] += choice["text"]
        whole["token_ids"] += choice["token_ids"]
        tokens += choice["logprobs"]["tokens"]
        if choice["finish_reason"]:
            whole |= {key: choice[key] for key in ("finish_reason", "stop_reason", "spec_metrics")}
            whole["ended"] += 1
    return whole | {"logprobs": {"tokens": tokens}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [1, 4, 8, 16])
@pytest.mark.parametrize("how", ["eos", "stop token", "stop string", "max_tokens", "min_tokens", "several"])
def test_an_end_inside_a_run(
    right: Running, answer: list[int], monkeypatch: pytest.MonkeyPatch, how: str, at: int, stream: bool
) -> None:
    """The at-th token, at the start, in the middle and at the end of a stride, is the last one."""
    at = next(i for i in range(at, 60) if answer[i - 1] not in answer[: i - 1])
    last, text = answer[at - 1], text_of(answer[:at])
    body: dict[str, Any] = {"max_tokens": 40, "ignore_eos": how != "eos"}
    reason, stop_reason, shown = "stop", None, text[:-1]
    if how == "eos":
        monkeypatch.setattr(right.engine.target, "eos_token_ids", frozenset((last,)))
    elif how == "stop token":
        body["stop_token_ids"], stop_reason = [last], last
    elif how == "stop string":
        body |= {"stop": text[-1]}
        stop_reason = text[-1]
    elif how == "max_tokens":
        body["max_tokens"], reason, shown = at, "length", text
    elif how == "min_tokens":  # every end within it is passed over; the first token behind it ends
        body |= {"stop": [text_of([token]) for token in {*answer[:at]}], "min_tokens": at - 1}
        stop_reason = text[-1]
    else:  # all of them within one run: the earliest
        later = [token for token in answer[at:] if token not in answer[:at]][:2]
        body |= {"stop": [text_of(later[:1])], "stop_token_ids": later[1:], "max_tokens": at + 1}
        body["stop"].append(text[-1])
        stop_reason = text[-1]
    before = scrape(right)["vllm:generation_tokens_total", ()]
    got = ask(right, body, stream)
    assert (got["finish_reason"], got["stop_reason"], got["ended"]) == (reason, stop_reason, 1)
    assert got["text"] == shown
    assert got["token_ids"] == answer[:at]
    assert "".join(got["logprobs"]["tokens"]) == text
    assert got["usage"] == {"prompt_tokens": 5, "completion_tokens": at, "total_tokens": 5 + at}
    assert scrape(right)["vllm:generation_tokens_total", ()] == before + at
    spec = got["spec_metrics"]
    if at > 1:
        assert spec["num_accepted_tokens"] > 0
    # a step gives at most K + 1 tokens, the first one none of the drafts
    assert spec["num_accepted_tokens"] <= at - 1
    assert spec["num_drafts"] == -(-(at - 1) // (K + 1))


def test_the_official_client_sees_the_same(right: Running, answer: list[int]) -> None:
    whole = right.client().completions.create(model=MODEL, prompt=PROMPT, temperature=0, max_tokens=11)
    assert whole.choices[0].text == text_of(answer[:11])
    right.settle()
