"""Bodies that would take long to parse, or much memory to hold, are refused before either."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from peagle.server import asgi, bodies
from peagle.server.bodies import most_body_bytes
from peagle.target import Target
from tests.server.conftest import Running, Start, tiny_engine, wait_for

SMALL = {"prompt": [1, 2], "max_tokens": 1}
MOST = most_body_bytes(256)


def post(server: Running, content: bytes | Iterator[bytes]) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}/v1/completions", content=content, headers=headers, timeout=60)


def padded(size: int) -> bytes:
    return json.dumps(SMALL).encode().ljust(size)


@pytest.mark.parametrize(
    ("max_model_len", "most"),
    [(1, 2 * 2**20), (4096, 2 * 2**20), (8192, 4 * 2**20), (65536, 32 * 2**20), (2**20, 32 * 2**20)],
)
def test_the_limit_follows_the_models_length(max_model_len: int, most: int) -> None:
    assert most_body_bytes(max_model_len) == most


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_at_the_limit(server: Running, chunked: bool) -> None:
    for size, status in ((MOST, 200), (MOST + 1, 413)):
        body = padded(size)
        assert post(server, iter([body[:5000], body[5000:]]) if chunked else body).status_code == status


@pytest.mark.parametrize("what", ["[],", "{},", '"a":'])
@pytest.mark.parametrize("chunked", [False, True])
def test_structure_at_the_limit(server: Running, monkeypatch: pytest.MonkeyPatch, what: str, chunked: bool) -> None:
    monkeypatch.setattr(bodies, "MAX_BRACKETS", 1000)
    for count, said in ((1000, "not valid JSON"), (1001, "expected at most 1000 and ")):
        body = what.encode() * count
        answer = post(server, iter([body[:1500], body[1500:]]) if chunked else body)
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]


def test_commas_at_the_limit(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_COMMAS", 100)
    body = {"prompt": [1] * 99, "max_tokens": 1, "n": 1}  # two commas are between the fields
    assert server.post("/v1/completions", body).status_code == 200
    error = server.post("/v1/completions", body | {"seed": 1}).json()["error"]
    assert "101 commas, expected at most" in error["message"]


def test_what_is_parsed_in_no_time_is_not_refused(server: Running) -> None:
    text = 'for (i = [0]; a[i]: {"b": [1, 2]}) ' * 4  # of code and JSON
    assert server.post("/v1/completions", {"prompt": text, "max_tokens": 1}).status_code == 200
    error = post(server, b'{"prompt":[' + b"[]," * (bodies.MAX_BRACKETS - 4) + b"[]]}").json()["error"]
    assert "n times prompts" in error["message"]  # it has been parsed
    error = post(server, b'{"prompt":[' + b"[]," * bodies.MAX_BRACKETS + b"[]]}").json()["error"]
    assert error["message"].startswith("body: got ")


def begin(server: Running, stack: ExitStack, sent: int) -> socket.socket:
    """A client that has sent so much of a body of the largest size, and does not go on."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = stack.enter_context(socket.create_connection((host, int(port))))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {MOST}\r\n\r\n".encode() + b" " * sent)
    return sock


def test_unfinished_bodies_are_bounded_together(start: Start, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[asgi.Unfinished] = []

    class Seen(asgi.Unfinished):
        def __init__(self, most: int) -> None:
            super().__init__(most)
            made.append(self)

    monkeypatch.setattr(asgi, "UNFINISHED_BODIES", 2)
    monkeypatch.setattr(asgi, "Unfinished", Seen)
    server = start(tiny_engine(target))
    (unfinished,) = made
    assert unfinished.most == 2 * MOST
    part = MOST * 3 // 4
    with ExitStack() as stack:
        first, _ = begin(server, stack, part), begin(server, stack, part)
        wait_for(lambda: unfinished.held == 2 * part)
        late = begin(server, stack, part)
        late.settimeout(60)
        head, _, error = late.recv(65536).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 429")
        assert b"retry-after: 1" in head.lower()
        assert json.loads(error)["error"]["code"] == "bodies_full"
        wait_for(lambda: unfinished.held == 2 * part)  # what was held of the refused one is free again
        assert server.post("/v1/completions", SMALL).status_code == 200  # small ones come in one piece
        # a body that is there to its end is held no more, whatever is wrong with it
        first.sendall(b" " * (MOST - part))
        assert first.recv(65536).startswith(b"HTTP/1.1 400")
        assert unfinished.held == part
    wait_for(lambda: unfinished.held == 0)
    assert post(server, padded(MOST)).status_code == 200
    server.settle()
    assert unfinished.held == 0
