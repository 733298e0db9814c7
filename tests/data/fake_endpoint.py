"""A completions server on a loopback port that answers by a script: with token ids or text only, refusals, errors."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Reply:
    """One answer. stall: seconds of silence after the first token. cut: the connection breaks after it.

    counted: what usage says of prompt and answer, by default the truth. prompt_told: prompt_token_ids, where not None.
    raw: a piece that is sent first, whatever it is.
    """

    tokens: Sequence[int] = ()
    finish: str = "stop"
    status: int = 200
    message: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    stall: float = 0.0
    cut: bool = False
    delay: float = 0.0
    prompt_told: Sequence[int] | None = None
    raw: Any = None
    prompt_counted: int | None = None
    answer_counted: int | None = None


@dataclass
class FakeEndpoint:
    """reply(body, n): the answer to a request, the n-th of its prompt from 0. decode: tokens to the answer's text.

    text_only: tells no token ids. strict: refuses fields that OpenAI's API does not have.
    """

    reply: Callable[[dict[str, Any], int], Reply]
    decode: Callable[[Sequence[int]], str]
    text_only: bool = False
    strict: bool = False
    url: str = ""
    seen: list[tuple[int, ...]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    most_at_once: int = 0
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, body: dict[str, Any]) -> int:
        with self._lock:
            prompt = tuple(body["prompt"])
            before = self.seen.count(prompt)
            if body["max_tokens"] > 1:  # else it is the probe
                self.seen.append(prompt)
                self.times.append(time.monotonic())
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            return before

    def leave(self) -> None:
        with self._lock:
            self._now -= 1


def handler(fake: FakeEndpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def whole(self, status: int, content: Any, headers: dict[str, str]) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(data))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            found = self.path == "/v1/models"
            self.whole(200 if found else 404, {"data": [{"id": "fake"}]} if found else {}, {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/v1/completions":
                self.whole(404, {}, {})
                return
            number = fake.enter(body)
            try:
                self.answer(body, fake.reply(body, number))
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                fake.leave()
                self.close_connection = True

        def answer(self, body: dict[str, Any], reply: Reply) -> None:
            if fake.strict and (unknown := body.keys() & {"top_k", "return_token_ids", "stop_token_ids"}):
                self.whole(400, {"error": {"message": f"unrecognized: {sorted(unknown)}"}}, {})
                return
            time.sleep(reply.delay)
            if reply.status != 200:
                self.whole(reply.status, {"error": {"message": reply.message}}, reply.headers)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            if reply.raw is not None:
                self.event(reply.raw)
            tokens = list(reply.tokens)[: body["max_tokens"]]
            for index, token in enumerate(tokens):
                if index:
                    time.sleep(reply.stall)
                if index and reply.cut:
                    return
                text = fake.decode([token]) if token > 2 else ""  # special tokens are not shown
                ids = {} if fake.text_only or "return_token_ids" not in body else {"token_ids": [token]}
                if reply.prompt_told is not None and not index:
                    ids["prompt_token_ids"] = list(reply.prompt_told)
                self.event({"choices": [{"index": 0, "text": text, **ids, "finish_reason": None}]})
            finish = reply.finish if len(tokens) == len(reply.tokens) else "length"
            self.event({"choices": [{"index": 0, "text": "", "finish_reason": finish}]})
            prompt = len(body["prompt"]) if reply.prompt_counted is None else reply.prompt_counted
            answered = len(tokens) if reply.answer_counted is None else reply.answer_counted
            self.event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": answered}})
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, data: Any) -> None:
            self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
            self.wfile.flush()

    return Handler


@contextmanager
def fake_endpoint(
    reply: Callable[[dict[str, Any], int], Reply], decode: Callable[[Sequence[int]], str], **settings: Any
) -> Iterator[FakeEndpoint]:
    """Runs until the block ends."""
    fake = FakeEndpoint(reply, decode, **settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(fake))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
