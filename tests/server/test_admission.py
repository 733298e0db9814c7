"""Requests hold their places from the beginning: while their texts are tokenized, too."""

from __future__ import annotations

import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from peagle.server.prompts import Prompts
from peagle.target import Target
from tests.server.conftest import Start, tiny_engine, wait_for
from tests.server.test_lifecycle import connect

TEXT = {"prompt": "hello", "max_tokens": 2, "temperature": 0}
TOKENIZE, DETOKENIZE = ("/tokenize", {"prompt": "hello"}), ("/detokenize", {"tokens": [1, 2]})


class Held:
    """The tokenizer's thread, which waits for `gate` before each piece of work; done: how many it has begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate, self.begun = threading.Event(), 0
        run = Prompts._run

        async def held(prompts: Prompts, work: Any) -> Any:
            def later() -> Any:
                self.begun += 1
                self.gate.wait(60)
                return work()

            return await run(prompts, later)

        monkeypatch.setattr(Prompts, "_run", held)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


def test_no_more_is_tokenized_than_can_be_run(start: Start, target: Target, tokenizer: Held) -> None:
    server = start(tiny_engine(target, max_num_seqs=2), max_queue=3)
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(server.post, "/v1/completions", TEXT) for _ in range(12)]
        wait_for(lambda: sum(answer.done() for answer in waiting) == 7)
        assert [answer.result().status_code for answer in waiting if answer.done()] == [429] * 7
        assert server.loop.num_taken == 5
        # n answers take n places
        assert server.post("/v1/completions", TEXT | {"n": 5}).status_code == 429
        tokenizer.gate.set()
        assert sorted(answer.result().status_code for answer in waiting) == [200] * 5 + [429] * 7
    assert tokenizer.begun == 5
    assert server.loop.num_taken == 0
    server.settle()


def test_a_client_that_goes_while_its_texts_are_tokenized(start: Start, target: Target, tokenizer: Held) -> None:
    server = start(tiny_engine(target))
    with connect(server, TEXT | {"prompt": ["x"] * 40}):
        wait_for(lambda: tokenizer.begun == 1)
        assert server.loop.num_taken == 40
    wait_for(lambda: server.loop.num_taken == 0)
    tokenizer.gate.set()
    assert server.post("/v1/completions", TEXT).status_code == 200
    assert tokenizer.begun == 2  # of the other 39 none
    server.settle()


@pytest.mark.parametrize("body", [{"prompt": "x" * 10000}, {"prompt": [1, 400]}, {"prompt": []}, {"model": "none"}])
def test_a_request_that_is_refused_gives_its_places_back(start: Start, target: Target, body: dict[str, Any]) -> None:
    server = start(tiny_engine(target, max_num_seqs=1), max_queue=0)
    for _ in range(2):
        assert server.post("/v1/completions", TEXT | body).status_code in (400, 404)
    assert server.post("/v1/completions", TEXT).status_code == 200


def test_what_is_tokenized_at_sigterm_is_finished(start: Start, target: Target, tokenizer: Held) -> None:
    server = start(tiny_engine(target))
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(server.post, *ask) for ask in (("/v1/completions", TEXT), TOKENIZE)]
        wait_for(lambda: server.loop.num_taken == 2)
        server.server.handle_exit(signal.SIGTERM, None)
        wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 503)
        for path, body in (("/v1/completions", TEXT), TOKENIZE, DETOKENIZE):
            assert server.post(path, body).status_code == 503
        assert not server.server.should_exit
        tokenizer.gate.set()
        assert [answer.result().status_code for answer in running] == [200, 200]
    wait_for(lambda: server.server.should_exit)


def test_what_is_tokenized_when_the_drain_ends_gets_503(start: Start, target: Target, tokenizer: Held) -> None:
    server = start(tiny_engine(target), drain_seconds=0.2)
    with ThreadPoolExecutor(3) as pool:
        asks = (("/v1/completions", TEXT), ("/v1/completions", TEXT | {"stream": True}), TOKENIZE)
        running = [pool.submit(server.post, *ask) for ask in asks]
        wait_for(lambda: server.loop.num_taken == 3)
        server.server.handle_exit(signal.SIGTERM, None)
        answers = [answer.result() for answer in running]
    tokenizer.gate.set()
    assert [answer.status_code for answer in answers] == [503] * 3
    assert {json.loads(answer.text)["error"]["code"] for answer in answers} == {"shutting_down"}


@pytest.mark.parametrize("ask", [TOKENIZE, DETOKENIZE])
def test_tokenizing_alone_is_bounded_and_takes_no_place(
    start: Start, target: Target, tokenizer: Held, ask: tuple[str, dict[str, Any]]
) -> None:
    server = start(tiny_engine(target, max_num_seqs=2), max_queue=0)
    with ThreadPoolExecutor(6) as pool:
        waiting = [pool.submit(server.post, *ask) for _ in range(5)]
        wait_for(lambda: sum(answer.done() for answer in waiting) == 3)
        other = pool.submit(server.post, "/v1/completions", {"prompt": [1, 2], "max_tokens": 2})  # it has its tokens
        assert other.result().status_code == 200
        tokenizer.gate.set()
        assert sorted(answer.result().status_code for answer in waiting) == [200, 200, 429, 429, 429]
    assert server.loop.num_taken == 0
