"""The prompt in the answer: `echo` and `prompt_logprobs`, in vLLM's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.engine.sampling_params import SamplingParams
from peagle.target import Target
from tests.server.conftest import MODEL, Running, tiny_engine

PROMPT = [30, 40, 50, 60, 35]


@pytest.fixture(scope="module")
def reported(target: Target) -> list[dict[int, float] | None]:
    """The engine's own report on PROMPT with the two likeliest tokens, as logprobs by token id."""
    engine = tiny_engine(target, None)
    request = engine.add_request("one", PROMPT, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=2))
    while engine.has_unfinished:
        engine.step()
    assert request.prompt_logprobs is not None
    return [
        None if position is None else {token: entry.logprob for token, entry in position.items()}
        for position in request.prompt_logprobs
    ]


def text_of(ids: list[int]) -> str:
    return "".join(chr(33 + token) for token in ids)  # of the tiny tokenizer's first 94 ids


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_logprobs(server: Running, reported: list[dict[int, float] | None], chat: bool) -> None:
    settings: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "n": 2, "prompt_logprobs": 2}
    if chat:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = server.post("/v1/chat/completions", body | settings | {"return_token_ids": True}).json()
        ids, found = answer["prompt_token_ids"], [answer["prompt_logprobs"]]
    else:
        answer = server.post("/v1/completions", {"prompt": PROMPT} | settings).json()
        ids, found = PROMPT, [choice["prompt_logprobs"] for choice in answer["choices"]]
        assert len(found) == 2  # both choices show it
        for position, known in zip(found[0], reported, strict=True):
            assert position is known is None or {int(t): e["logprob"] for t, e in position.items()} == known
    for listed in found:
        assert listed[0] is None
        for token, position in zip(ids[1:], listed[1:], strict=True):
            assert next(iter(position)) == str(token)
            assert all(entry.keys() == {"logprob", "rank", "decoded_token"} for entry in position.values())
            assert {1, 2} <= {entry["rank"] for entry in position.values()}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(server: Running, reported: list[dict[int, float] | None], stream: bool, n: int) -> None:
    client = server.client()
    settings: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 6, "logprobs": 1}
    alone = client.completions.create(**settings).choices[0]
    assert alone.logprobs is not None
    texts = [""] * n
    tokens: list[list[str]] = [[] for _ in range(n)]
    values: list[list[float | None]] = [[] for _ in range(n)]
    offsets: list[list[int]] = [[] for _ in range(n)]
    tops: list[list[Any]] = [[] for _ in range(n)]
    answer = client.completions.create(**settings, echo=True, n=n, stream=stream)
    for part in answer if stream else [answer]:  # type: ignore[union-attr]
        for choice in part.choices:  # type: ignore[union-attr]
            texts[choice.index] += choice.text
            logprobs = choice.logprobs
            assert logprobs is not None
            tokens[choice.index] += logprobs.tokens or []
            values[choice.index] += logprobs.token_logprobs or []
            offsets[choice.index] += logprobs.text_offset or []
            tops[choice.index] += logprobs.top_logprobs or []
    for i in range(n):
        assert texts[i] == "".join(tokens[i]) == text_of(PROMPT) + alone.text
        assert offsets[i] == list(range(len(texts[i])))
        assert values[i][0] is tops[i][0] is None
        known = [at[token] for token, at in zip(PROMPT[1:], reported[1:], strict=True) if at is not None]
        assert values[i][1 : len(PROMPT)] == known
        assert values[i][len(PROMPT) :] == pytest.approx(alone.logprobs.token_logprobs, abs=1e-4)
        assert all(len(top) in (1, 2) for top in tops[i][1:])


@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_alone(server: Running, reported: list[dict[int, float] | None], stream: bool) -> None:
    client = server.client()
    settings: dict[str, Any] = {"model": MODEL, "prompt": [PROMPT, [7]], "max_tokens": 0, "echo": True, "logprobs": 0}
    choices: list[Any] = []
    if stream:
        for chunk in client.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
            choices += chunk.choices
            usage = chunk.usage
    else:
        answer = client.completions.create(**settings)
        choices, usage = list(answer.choices), answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (6, 0)
    choices.sort(key=lambda choice: choice.index)
    assert [choice.text for choice in choices] == [text_of(PROMPT), text_of([7])]
    assert [choice.finish_reason for choice in choices] == ["length", "length"]
    assert len(choices[0].logprobs.tokens) == len(PROMPT)
    assert choices[1].logprobs.token_logprobs == [None]


def test_echo_of_text_without_logprobs(server: Running) -> None:
    body = {
        "prompt": ["once ", "two\nlines"],
        "max_tokens": 2,
        "temperature": 0,
        "echo": True,
        "return_token_ids": True,
    }
    choices = server.post("/v1/completions", body).json()["choices"]
    for choice, prompt in zip(choices, body["prompt"], strict=True):  # type: ignore[call-overload]
        assert choice["text"].startswith(prompt)
        assert len(choice["text"]) == len(prompt) + 2
        assert choice["logprobs"] is None
        assert "prompt_logprobs" not in choice
        assert len(choice["token_ids"]) == 2
        assert len(choice["prompt_token_ids"]) == len(prompt)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": -2}, "prompt_logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"echo": "yes"}, "echo"),
    ],
)
def test_what_is_refused(server: Running, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/completions", {"prompt": [1, 2]} | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_chats_field_is_named_as_in_the_body(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 21}
    error = server.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "top_logprobs"
    assert error["message"].startswith("top_logprobs: got 21, expected at most 20")
