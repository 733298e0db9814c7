"""Requests made up from the server's own OpenAPI document, and extremes of every field beside requests that must go on:
whatever comes, no 500, and the server lives on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import hypothesis
import pytest

from peagle.server.protocol import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from tests.server.conftest import Running

schemathesis = pytest.importorskip("schemathesis")

MANY = 5000
INFINITY, NAN = float("inf"), float("nan")
TOO_LARGE = (2**63, 10**30)
NUMBERS = (
    *TOO_LARGE,
    2**63 - 1,
    2**31,
    0,
    -1,
    -(2**63),
    -(10**30),
    1e308,
    -1e308,
    1e-320,
    0.5,
    NAN,
    INFINITY,
    -INFINITY,
)
OTHERS = (True, "", "x" * MANY, "\ud800", "\x00", [], {}, [None], [[]], {"": None})
LISTS = tuple([value] * MANY for value in (-1, 2**63, 0.5, "", "x", None, [], {}, [-1] * 3, {"role": "user"}))
OBJECTS = tuple({str(i): value for i in range(MANY)} for value in (1, "x", None))
IDS = tuple({key: 1} for key in ("-1", str(2**63), str(10**30), "9" * MANY, "1_0", "", "0x1"))
IDS += tuple({"1": value} for value in (NAN, INFINITY, 1e308, 10**30, None))
EXTREMES = NUMBERS + OTHERS + LISTS + OBJECTS + IDS
BODIES: list[tuple[str, type[Body], dict[str, Any]]] = [
    ("/v1/completions", CompletionBody, {"prompt": [1, 2], "max_tokens": 2}),
    ("/v1/chat/completions", ChatBody, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
    ("/tokenize", TokenizeBody, {"prompt": "x"}),
    ("/detokenize", DetokenizeBody, {"tokens": [1, 2]}),
]
INTEGERS = ("max_tokens", "max_completion_tokens", "n", "seed", "top_k", "min_tokens", "prompt_logprobs", "logprobs")
INTEGERS += ("top_logprobs", "num_speculative_tokens", "best_of")


@contextmanager
def bystander(server: Running) -> Iterator[None]:
    """One request after the other while something else goes on; each must get the same answer."""
    ended = threading.Event()
    body = {"prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "temperature": 0}

    def ask() -> set[tuple[int, str]]:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            answers = [client.post("/v1/completions", json=body)]
            while not ended.is_set():
                answers.append(client.post("/v1/completions", json=body))
        return {(answer.status_code, json.dumps(answer.json().get("choices"))) for answer in answers}

    with ThreadPoolExecutor(1) as pool:
        seen = pool.submit(ask)
        try:
            yield
        finally:
            ended.set()
        ((status, _),) = seen.result()
        assert status == 200


@pytest.mark.parametrize(("path", "kind", "base"), BODIES, ids=[path for path, *_ in BODIES])
def test_extremes_of_every_field(server: Running, path: str, kind: type[Body], base: dict[str, Any]) -> None:
    with bystander(server), httpx.Client(base_url=server.url, timeout=60) as client:
        fields = kind.model_fields
        if kind is ChatBody:  # those of both have had theirs
            fields = {name: fields[name] for name in fields if name not in CompletionBody.model_fields}
        for field in fields:
            for value in EXTREMES:
                body = {key: one for key, one in base.items() if key != "max_tokens" or field[:3] != "max"}
                # as many clients write it, with NaN and infinities
                content = json.dumps(body | {field: value})
                answer = client.post(path, content=content, headers={"Content-Type": "application/json"})
                said = (field, content[:100], answer.text[:300])
                assert answer.status_code in (200, 400, 404), said  # 404: of a model
                if answer.status_code != 200:
                    error = answer.json()["error"]
                    assert error["param"], said
                    assert len(error["message"]) < 1000, said
                if value in TOO_LARGE and field in INTEGERS:
                    assert (answer.status_code, error["param"]) == (400, field), said
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.settle()


@pytest.mark.parametrize("mode", ["positive", "negative"])
def test_no_request_makes_a_500(server: Running, mode: str) -> None:
    from schemathesis.generation import GenerationMode

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    generation = GenerationMode.POSITIVE if mode == "positive" else GenerationMode.NEGATIVE
    for result in schema.get_all_operations():
        operation = result.ok()
        if mode == "negative" and operation.method.upper() == "GET":
            continue

        @hypothesis.settings(
            max_examples=12,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(generation_mode=generation))
        def check(case: Any) -> None:
            answer = case.call(timeout=60)
            assert answer.status_code < 500, (case.body, answer.text)
            if answer.status_code >= 400:
                assert "error" in answer.json()

        check()
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.settle()
