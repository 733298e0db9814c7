"""What a request asks for beyond a limit is refused by name, at little cost, and nobody else notices."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from peagle.server.bodies import most_body_bytes
from peagle.server.protocol import (
    MAX_MESSAGES,
    MAX_TEMPLATE_ENTRIES,
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from peagle.server.wrong_values import MAX_PROMPT_ITEMS
from peagle.target import Target
from tests.server.conftest import Running, Start, hold, tiny_engine, wait_for

MANY = 20_000
CHAT = {"messages": [{"role": "user", "content": "x"}]}
LONG = {"prompt": [1, 2, 3], "max_tokens": 60, "ignore_eos": True, "temperature": 0}


@pytest.mark.parametrize("min_tokens", [1000, 2**63, 10**30])
def test_min_tokens_without_end(start: Start, target: Target, min_tokens: int) -> None:
    server = start(tiny_engine(target))
    gate = hold(server.engine)
    with ThreadPoolExecutor(1) as pool:
        bystander = pool.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: server.engine.requests)
        gate.set()
        for _ in range(3):
            answer = server.post("/v1/chat/completions", CHAT | {"min_tokens": min_tokens})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "min_tokens")
        assert bystander.result().json()["usage"]["completion_tokens"] == 60
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.settle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_planned_ends_alone(start: Start, target: Target, stream: bool) -> None:
    server = start(tiny_engine(target))
    gate, add = hold(server.engine), server.engine.add_request

    def spoiled(name: str, prompt: Any, params: Any = None, interval: int = 0) -> Any:
        request = add(name, prompt, params, interval)
        if prompt == [9]:
            object.__setattr__(request.params, "seed", 1)
            request.seed = 2**70
        return request

    server.engine.add_request = spoiled  # type: ignore[method-assign]
    with ThreadPoolExecutor(3) as pool:
        bystander = pool.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: server.engine.requests)
        wrong = [pool.submit(server.post, "/v1/completions", LONG | {"prompt": [9], "stream": stream}) for _ in "ab"]
        wait_for(lambda: server.loop.num_open == 3)
        gate.set()
        for answer in wrong:
            assert "OverflowError" in answer.result().text
            assert answer.result().status_code == (200 if stream else 500)
        assert bystander.result().json()["usage"]["completion_tokens"] == 60
    assert server.loop.metrics.finished["error"]._value.get() == 2
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.settle()


LARGE: list[tuple[type[Body], dict[str, Any], str]] = [
    (CompletionBody, {"prompt": [-1] * MANY}, "prompt"),
    (CompletionBody, {"prompt": [*[1] * MANY, "a"]}, "prompt"),
    (CompletionBody, {"prompt": ["a"] * MANY + [1]}, "prompt"),
    (CompletionBody, {"prompt": [[1]] * MANY + [[-1] * MANY]}, "prompt"),
    (CompletionBody, {"prompt": [None] * MANY}, "prompt"),
    (CompletionBody, {"prompt": [1] * (MAX_PROMPT_ITEMS + 1)}, "prompt"),
    (CompletionBody, {"prompt": [[1] * (MAX_PROMPT_ITEMS // 2)] * 3}, "prompt"),
    (CompletionBody, {"stop": [1] * MANY}, "stop"),
    (CompletionBody, {"stop": ["a"] * MANY}, "stop"),
    (CompletionBody, {"stop": ["a" * 1000] * 5}, "stop"),
    (CompletionBody, {"stop_token_ids": ["a"] * MANY}, "stop_token_ids"),
    (CompletionBody, {"stop_token_ids": [1] * MANY}, "stop_token_ids"),
    (CompletionBody, {"logit_bias": {str(i): "a" for i in range(MANY)}}, "logit_bias"),
    (CompletionBody, {f"unknown{i}": 1 for i in range(MANY)}, "unknown0"),
    (ChatBody, {"messages": [1] * MANY}, "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": "x"}] * MANY}, "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [1] * MANY}]}, "messages"),
    (ChatBody, {"messages": [{f"unknown{i}": 1 for i in range(MANY)}]}, "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"a": 1}] * (MANY // 4)}] * 5}, "messages"),
    (ChatBody, {"chat_template_kwargs": {str(i): 1 for i in range(MANY)}}, "chat_template_kwargs"),
    (ChatBody, {"chat_template_kwargs": {"a": [{"b": [[]] * MANY}]}}, "chat_template_kwargs"),
    (TokenizeBody, CHAT | {"chat_template_kwargs": {str(i): 1 for i in range(MANY)}}, "chat_template_kwargs"),
    (ChatBody, {"metadata": {str(i): 1 for i in range(MANY)}}, "metadata"),
    (TokenizeBody, {"messages": [{}] * MANY}, "messages"),
    (DetokenizeBody, {"tokens": [-1] * MANY}, "tokens"),
]


@pytest.mark.parametrize("number", range(len(LARGE)))
def test_a_large_wrong_value_makes_few_errors(server: Running, number: int) -> None:
    body, wrong, field = LARGE[number]
    whole: dict[str, Any] = {CompletionBody: {"prompt": "x"}, ChatBody: CHAT}.get(body, {}) | wrong
    with pytest.raises(ValidationError) as caught:
        body.model_validate(whole)
    assert caught.value.error_count() <= 5
    assert field in {error["loc"][0] for error in caught.value.errors()}
    paths = {CompletionBody: "/v1/completions", ChatBody: "/v1/chat/completions", TokenizeBody: "/tokenize"}
    answer = server.post(paths.get(body, "/detokenize"), whole)
    if len(json.dumps(whole, separators=(",", ":"))) > most_body_bytes(256):
        assert answer.status_code == 413
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)
    assert len(answer.text) < 600


@pytest.mark.parametrize(
    "prompt",
    ["a", ["a", "b"], [1, 2], [[1], [2, 3]], [0], ["a"] * 3],
    ids=["text", "texts", "ids", "lists", "0", "same"],
)
def test_every_kind_of_prompt(server: Running, prompt: Any) -> None:
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    "prompt",
    [None, True, 1, 1.5, {}, [True], [1, True], [1.0], ["a", 1], [1, "a"], [[1], "a"], [[1], [True]], [[["a"]]]],
)
def test_no_kind_of_prompt(server: Running, prompt: Any) -> None:
    error = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}).json()["error"]
    assert error["param"] == "prompt"
    assert "expected a text, a list of token ids" in error["message"]


@pytest.mark.parametrize("stop", [["a" * 1000] * 4, ["b" * 60] * 64, "c" * 1000])
def test_stop_strings_at_the_limit(server: Running, stop: Any) -> None:
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2, "stop": stop}).status_code == 200


@pytest.mark.parametrize("kind", ["p-eagle", None])
def test_more_drafts_than_the_server_makes(server: Running, start: Start, target: Target, kind: str | None) -> None:
    most = 3 if kind else 0
    served = server if kind else start(tiny_engine(target, None))
    body = {"prompt": [3, 4], "max_tokens": 4}
    assert served.post("/v1/completions", body | {"num_speculative_tokens": most}).status_code == 200
    for path, asked in (("/v1/completions", body), ("/v1/chat/completions", CHAT)):
        error = served.post(path, asked | {"num_speculative_tokens": most + 1}).json()["error"]
        assert error["param"] == "num_speculative_tokens"
        assert error["message"].startswith(f"num_speculative_tokens: got {most + 1}, expected ")


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ({"5": 1, "05": -100}, "token id 5 twice"),
        ({"1_0": 1}, "the key '1_0'"),
        ({" 1": 1}, "the key ' 1'"),
        ({"\u0661": 1}, "the key"),
        ({"-1": 1}, "the key '-1'"),
        ({"9" * 5000: 1}, "the key '999"),
    ],
)
def test_keys_of_logit_bias(server: Running, bias: dict[str, float], says: str) -> None:
    error = server.post("/v1/completions", {"prompt": "x", "logit_bias": bias}).json()["error"]
    assert error["param"] == "logit_bias"
    assert says in error["message"]
    assert len(error["message"]) < 200


@pytest.mark.parametrize("field", [{"add_generation_prompt": False}, {"chat_template_kwargs": {"a": 1}}])
def test_what_only_messages_are_rendered_with(server: Running, field: dict[str, Any]) -> None:
    answer = server.post("/tokenize", {"prompt": "a"} | field)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(field)))
    assert server.post("/tokenize", CHAT | field).status_code == 200


def test_messages_at_the_limit() -> None:
    part = {"type": "text", "text": "x"}
    halves = [{"role": "user", "content": [part] * (MAX_MESSAGES // 2)}] * 2
    assert len(ChatBody.model_validate({"messages": halves}).messages) == 2
    with pytest.raises(ValidationError, match=f"at most {MAX_MESSAGES} parts of all messages together, not 16385"):
        ChatBody.model_validate({"messages": [*halves, {"role": "user", "content": [part]}]})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_template_arguments_at_the_limit(server: Running, path: str) -> None:
    most = {"a": [[1]] * (MAX_TEMPLATE_ENTRIES // 2 - 1), "b": {}}  # each of the lists has an entry of its own
    body = CHAT | ({} if path == "/tokenize" else {"max_tokens": 1})
    assert server.post(path, body | {"chat_template_kwargs": most}).status_code == 200
    error = server.post(path, body | {"chat_template_kwargs": most | {"c": None}}).json()["error"]
    assert error["param"] == "chat_template_kwargs"
    assert f"expected at most {MAX_TEMPLATE_ENTRIES} entries" in error["message"]
