"""Clients that go, queues that fill, steps that fail, and the end: the server lives on and no block is lost."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.engine.engine import Engine
from peagle.engine.request import Status
from peagle.server.answers import Answer
from peagle.server.bodies import most_body_bytes
from peagle.server.run import banner
from peagle.target import Target
from tests.engine.helpers import replay, tiny_head
from tests.server.conftest import MODEL, Running, Start, hold, script, tiny_engine, wait_for

LONG = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "temperature": 0}


def connect(server: Running, body: dict[str, object]) -> socket.socket:
    """A client that has sent a request and waits; closing the socket is its leaving."""
    data = json.dumps(body).encode()
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return sock


@pytest.mark.parametrize("stream", [True, False])
def test_disconnect_aborts(start: Start, target: Target, stream: bool) -> None:
    server = start(tiny_engine(target))
    gate = hold(server.engine)
    with connect(server, LONG | {"stream": stream, "n": 3}):
        wait_for(lambda: len(server.engine.requests) == 3)
    wait_for(lambda: server.loop.num_open == 0)  # noticed while nothing is sent
    gate.set()
    server.settle()
    assert server.loop.metrics.finished["abort"]._value.get() == 3
    assert server.post("/v1/completions", {"prompt": "still here"}).status_code == 200


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("state", ["waiting", "in its prompt", "decoding"])
def test_disconnect_in_every_state(start: Start, target: Target, state: str, stream: bool) -> None:
    engine = tiny_engine(target, max_num_seqs=1, max_num_batched_tokens=16)
    server = start(engine)
    step, steps = engine.step, threading.Semaphore(0)

    def counted() -> object:
        steps.acquire(timeout=60)
        return step()

    engine.step = counted  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as pool:
        other = None
        if state == "waiting":
            other = pool.submit(server.post, "/v1/completions", LONG | {"max_tokens": 3})
            wait_for(lambda: engine.requests)  # and the thread is in its first step
        with connect(server, LONG | {"prompt": [*range(50)], "stream": stream}):
            if other:  # requests come in between two steps
                wait_for(lambda: server.loop._commands.qsize() == 1)
                steps.release()
            wait_for(lambda: len(engine.requests) == (2 if other else 1))
            request = [*engine.requests.values()][-1]
            reached = {
                "waiting": lambda: request.status is Status.WAITING,
                "in its prompt": lambda: 0 < request.num_computed < 50,
                "decoding": lambda: len(request.output_token_ids) > 2,
            }[state]
            while not reached():
                steps.release()
                wait_for(lambda: steps._value == 0)
                time.sleep(0.01)
        wait_for(lambda: server.loop.num_open == (1 if other else 0))
        steps.release(1000)
        assert other is None or other.result().json()["usage"]["completion_tokens"] == 3
    server.settle()
    assert request.finish_reason == "abort"
    assert server.post("/v1/completions", {"prompt": "still here"}).status_code == 200


def test_a_client_that_stops_reading_in_the_middle(start: Start, target: Target) -> None:
    server = start(tiny_engine(target))
    stream = server.client().completions.create(model=MODEL, prompt=[1], max_tokens=200, stream=True)
    for _, _chunk in zip(range(3), stream, strict=False):
        pass
    stream.close()
    server.settle()


def test_queue_full(start: Start, target: Target) -> None:
    server = start(tiny_engine(target, max_num_seqs=2), max_queue=1)
    gate = hold(server.engine)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(server.post, "/v1/completions", LONG | {"max_tokens": 5}) for _ in range(3)]
        wait_for(lambda: server.loop.num_open == 3)
        with pytest.raises(openai.RateLimitError) as caught:
            server.client().completions.create(model=MODEL, prompt="x")
        assert caught.value.code == "queue_full"
        assert caught.value.response.headers["retry-after"] == "1"
        # a call that could never fit is the client's mistake
        assert server.post("/v1/completions", {"prompt": "x", "n": 4}).json()["error"]["param"] == "n"
        gate.set()
        assert [answer.result().status_code for answer in running] == [200] * 3
    server.settle()
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_a_step_that_fails(start: Start, target: Target) -> None:
    server = start(tiny_engine(target))
    launch, broken = server.engine.runner.launch, threading.Event()

    def breaks(plan: object) -> object:
        if broken.is_set():
            raise RuntimeError("a kernel went wrong")
        return launch(plan)  # type: ignore[arg-type]

    server.engine.runner.launch = breaks  # type: ignore[method-assign, assignment]
    broken.set()
    with pytest.raises(openai.InternalServerError, match="a kernel went wrong"):
        server.client().completions.create(model=MODEL, prompt="x")
    chunks = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "stream": True}).text.split("\n\n")
    assert "a kernel went wrong" in chunks[-3]
    assert chunks[-2] == "data: [DONE]"
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.post("/v1/completions", {"prompt": "x"})
    assert httpx.get(f"{server.url}/health").status_code == 503  # three in a row
    broken.clear()
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert httpx.get(f"{server.url}/health").status_code == 200
    server.settle()


@pytest.mark.parametrize("where", ["in the engine", "in the answer"])
def test_a_failure_in_the_middle_of_a_stream(
    start: Start, target: Target, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What has come stays, then one error and the end."""
    server = start(tiny_engine(target, None))
    step, logprobs = server.engine.step, Answer._logprobs
    broken = threading.Event()

    def breaks(*args: object) -> object:
        if broken.is_set():
            broken.clear()
            raise RuntimeError("in the middle")
        return step() if where == "in the engine" else logprobs(*args)  # type: ignore[arg-type]

    if where == "in the engine":
        server.engine.step = breaks  # type: ignore[method-assign, assignment]
    else:
        monkeypatch.setattr(Answer, "_logprobs", breaks)
    lines = []
    body = LONG | {"stream": True, "n": 2}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        for line in answer.iter_lines():
            lines += [line] if line else []
            if len(lines) == 6:
                broken.set()
    assert answer.status_code == 200
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "server_error"
    assert all("error" not in line for line in lines[:-2])
    server.settle()
    assert server.post("/v1/completions", LONG | {"max_tokens": 5}).status_code == 200


def test_a_step_that_fails_after_requests_ended(start: Start, target: Target) -> None:
    server = start(tiny_engine(target))
    remove, failed = server.engine.scheduler.remove_finished, threading.Event()

    def breaks(finished: list[object]) -> None:
        if finished and not failed.is_set():
            failed.set()
            raise RuntimeError("too early")
        remove(finished)  # type: ignore[arg-type]

    server.engine.scheduler.remove_finished = breaks  # type: ignore[method-assign, assignment]
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 500
    server.settle()


def test_the_queue_is_looked_at_before_any_work(start: Start, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(tiny_engine(target, max_num_seqs=2), max_queue=1)
    gate = hold(server.engine)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(server.post, "/v1/completions", LONG | {"max_tokens": 5}) for _ in range(3)]
        wait_for(lambda: server.loop.num_open == 3)
        with monkeypatch.context() as broken:
            broken.setattr("peagle.server.prompts.Prompts._run", None)  # no tokenizing
            assert server.post("/v1/completions", {"prompt": "x"}).status_code == 429
            several = server.post("/v1/completions", {"prompt": ["x", "y"], "n": 2})
            assert (several.status_code, several.json()["error"]["param"]) == (400, "n")
            assert server.post("/v1/completions", {"prompt": "x" * 2**20}).status_code == 429
        assert server.loop.metrics.rejected._value.get() == 2
        gate.set()
        assert [answer.result().status_code for answer in running] == [200] * 3
    too_long = server.post("/v1/completions", {"prompt": "x" * 2**20}).json()["error"]
    assert (too_long["param"], too_long["code"]) == ("prompt", "context_length_exceeded")
    server.settle()


def test_nobody_waits_for_a_thread_that_has_ended(
    start: Start, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = start(tiny_engine(target))
    gate = hold(server.engine)

    def breaks(*_: object) -> None:
        raise RuntimeError("not even dropping works")

    monkeypatch.setattr(server.loop, "_report", breaks)
    monkeypatch.setattr(server.loop, "_drop_all", breaks)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: len(server.engine.requests) == 1)
        # these are still on their way to the engine when it breaks
        late = [pool.submit(server.post, "/v1/completions", LONG | {"stream": stream}) for stream in (False, True)]
        wait_for(lambda: server.loop.num_open == 3)
        gate.set()
        assert first.result().status_code == 500
        assert "not even dropping works" in first.result().text
        assert [answer.result().status_code for answer in late] == [500, 500]
    assert server.post("/v1/completions", LONG).status_code == 500
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert server.loop.num_open == 0


def test_drain(start: Start, target: Target) -> None:
    server = start(tiny_engine(target))
    gate = hold(server.engine)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", LONG | {"max_tokens": 5})
        wait_for(lambda: server.loop.num_open == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        with pytest.raises(openai.InternalServerError) as caught:
            server.client().completions.create(model=MODEL, prompt="x")
        assert caught.value.status_code == 503
        assert caught.value.code == "shutting_down"
        assert httpx.get(f"{server.url}/health").status_code == 503
        gate.set()
        assert running.result().status_code == 200
    wait_for(lambda: server.server.should_exit)
    server.settle()


def test_a_drain_waits_for_clients_that_read_slowly(start: Start, target: Target) -> None:
    """The engine is done with an answer long before a slow client has it."""
    server = start(tiny_engine(target), drain_seconds=20)
    server.server.handle_exit(signal.SIGTERM, None)
    wait_for(lambda: server.server.should_exit)
    assert 15 < server.server.config.timeout_graceful_shutdown <= 20  # type: ignore[operator]
    assert not server.server.force_exit
    server.server.handle_exit(signal.SIGTERM, None)  # a second one waits for nobody
    assert server.server.force_exit


def test_a_chat_stream_begins_with_its_first_token(start: Start, target: Target) -> None:
    """Load generators take the role chunk's time for the first token's."""
    server = start(tiny_engine(target))
    gate = hold(server.engine)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
    came: list[str] = []

    def read() -> None:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=body | {"model": MODEL}, timeout=60) as answer:
            came.extend(line for line in answer.iter_lines() if line)

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        wait_for(lambda: server.loop.num_open == 1)
        time.sleep(0.3)
        assert came == []
        gate.set()
        reading.result()
    assert '"role": "assistant"' in came[0].replace('":"', '": "')


def test_drain_ends_after_its_time(start: Start, target: Target) -> None:
    server = start(tiny_engine(target), drain_seconds=0.2)
    step = server.engine.step

    def endless() -> object:
        wait_for(lambda: server.server.should_exit)
        server.engine.step = step  # type: ignore[method-assign]
        return step()

    server.engine.step = endless  # type: ignore[method-assign, assignment]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", LONG)
        wait_for(lambda: server.loop.num_open == 1)
        server.server.handle_exit(signal.SIGTERM, None)
        answer = running.result()
    assert answer.status_code == 503
    server.settle()


def events(answer: httpx.Response) -> list[dict[str, object]]:
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def streamed(server: Running, **body: object) -> list[str]:
    chunks = events(server.post("/v1/completions", {"prompt": "x", "stream": True, **body}))
    return [chunk["choices"][0]["text"] for chunk in chunks]  # type: ignore[index]


@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_characters_and_stop_strings_split_across_steps_with_drafts(start: Start, target: Target, right: int) -> None:
    """As below, where steps bring up to four tokens: of every draft so many are accepted."""
    engine = tiny_engine(target, dynamic_speculation=False)
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    text = "aé→🙂b STOP c"
    tokens = list(tokenizer(text, add_special_tokens=False).input_ids)
    prompt = [5]
    known = prompt + tokens

    class Everybody(dict[str, list[int]]):
        def __missing__(self, name: str) -> list[int]:
            return known

    # the target says the text by way of its bias: each step's choices are replaced by what stands there
    choose = engine.runner._choose
    replay(engine, Everybody(), None if right == 3 else lambda _: right)

    def chosen(logits: Any, inputs: Any, packed: Any) -> Any:
        choices = choose(logits, inputs, packed)
        following = (inputs.batch.positions[inputs.logit_rows[: inputs.num_choices]] + 1).tolist()
        return torch.tensor([known[at] if at < len(known) else 0 for at in following]).to(choices)

    engine.runner._choose = chosen  # type: ignore[method-assign]
    server = start(engine)

    def pieces(**body: object) -> list[str]:
        return streamed(server, **{"prompt": prompt, "max_tokens": len(tokens), "ignore_eos": True, **body})

    whole = pieces()
    assert "".join(whole) == text
    assert (len(whole) == len(text)) == (right == 0)  # with drafts a step shows several at once
    assert "\ufffd" not in "".join(whole)  # nothing half is ever sent
    assert "".join(pieces(max_tokens=2)) == "a\ufffd"
    assert "".join(pieces(stop="STOP")) == "aé→🙂b "
    held = pieces(stop="STORE")
    assert "".join(held) == text
    assert all(not piece.endswith(("S", "ST", "STO")) for piece in held)  # held back, then sent after all
    assert "".join(pieces(stop=["OP", "→"], include_stop_str_in_output=True)) == "aé→"
    if right:
        assert engine.stats.spec.num_accepted_tokens > 0
    server.settle()


def test_characters_and_stop_strings_split_across_steps(start: Start, target: Target) -> None:
    engine = tiny_engine(target, None)
    assert engine.target.tokenizer is not None
    text = "aé→🙂b STOP c"
    tokens = engine.target.tokenizer(text, add_special_tokens=False).input_ids
    script(engine, list(tokens))
    server = start(engine)
    # one token is one byte: nothing half is ever sent
    assert streamed(server, max_tokens=len(tokens)) == [*text]
    assert streamed(server, max_tokens=2) == ["a", "\ufffd"]  # the end of the answer lies within a character
    pieces = streamed(server, max_tokens=len(tokens), stop="STOP")
    assert "".join(pieces) == "aé→🙂b "
    pieces = streamed(server, max_tokens=len(tokens), stop="STORE")  # held back, then sent after all
    assert pieces == [*"aé→🙂b ", "STOP", *" c"]
    pieces = streamed(server, max_tokens=len(tokens), stop=["OP", "→"], include_stop_str_in_output=True)
    assert "".join(pieces) == "aé→"


def test_stream_interval(start: Start, target: Target) -> None:
    engine = tiny_engine(target, None)
    assert engine.target.tokenizer is not None
    script(engine, list(engine.target.tokenizer("0123456789", add_special_tokens=False).input_ids))
    server = start(engine, stream_interval=4)
    assert streamed(server, max_tokens=10) == ["0", "1234", "5678", "9"]


def test_text_stays_due_until_a_character_is_complete(start: Start, target: Target) -> None:
    engine = tiny_engine(target, None)
    assert engine.target.tokenizer is not None
    tokens = list(engine.target.tokenizer("0🙂→é12345", add_special_tokens=False).input_ids)  # a token a byte
    script(engine, tokens)
    server = start(engine, stream_interval=2)
    assert streamed(server, max_tokens=len(tokens)) == ["0", "🙂", "→", "é", "12", "34", "5"]


@pytest.mark.parametrize("stream", [False, True])
def test_text_that_cannot_be_made_fails_its_step(
    start: Start, target: Target, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """Nobody waits for what will not come, and the server lives on."""

    def broken(*_: object) -> str:
        raise ValueError("no such token")

    server = start(tiny_engine(target, None))
    body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": stream}
    with monkeypatch.context() as patch:
        patch.setattr("peagle.engine.detokenizer.Detokenizer._decode", broken)
        answer = server.post("/v1/completions", body)
    if stream:
        assert "no such token" in answer.text
    else:
        assert answer.status_code == 500
    server.settle()
    assert server.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_synthetic_acceptance_is_unmistakable(start: Start, target: Target, stream: bool) -> None:
    settings = EngineConfig(max_num_seqs=2, max_model_len=128, num_kv_blocks=16)
    engine = Engine(target, tiny_head(target), 3, settings, synthetic_rates=(1.0, 0.5, 0.0))
    assert "\nBENCHMARK ONLY" in banner(engine, (MODEL,), "http://127.0.0.1", [])
    assert "BENCHMARK ONLY" not in banner(tiny_engine(target), (MODEL,), "http://127.0.0.1", [])
    server = start(engine)
    answer = server.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 20, "stream": stream, "ignore_eos": True})
    choices = [chunk["choices"][0] for chunk in events(answer)] if stream else answer.json()["choices"]  # type: ignore[index]
    metrics = choices[-1]["spec_metrics"]  # though nobody has asked
    assert metrics["synthetic"].startswith("BENCHMARK ONLY")
    assert metrics["num_accepted_tokens"] >= metrics["num_drafts"] > 0


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(server: Running, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * most_body_bytes(256)}).encode()
    content = iter([body[:-2000], body[-2000:]]) if chunked else body
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 413
    assert f"expected at most {most_body_bytes(256)}: " in answer.json()["error"]["message"]
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_a_path_or_a_method_that_is_not_served(server: Running) -> None:
    answer = server.post("/v1/embeddings", {"input": "x"})
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("path: /v1/embeddings is not served here")
    answer = httpx.get(f"{server.url}/v1/completions")
    assert answer.status_code == 405
    assert answer.json()["error"]["message"] == "method: got GET for /v1/completions, expected POST"
    assert answer.headers["allow"] == "POST"
