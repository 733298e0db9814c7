"""An OpenAI-compatible server on a loopback port that behaves as a test tells it to, request by request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# How it may answer: in full, or as its name says.
BEHAVIOURS = (
    *("ok", "http_500", "stall", "slow", "error_event", "cut_off", "no_usage", "not_json", "drop", "empty"),
    *("abort", "error"),
)
# Events of another shape than the API's, each in place of a whole answer; and usages behind a whole answer.
ODD_EVENTS: dict[str, Any] = {
    "text_for_delta": {"choices": [{"delta": "hello"}]},
    "text_for_choice": {"choices": ["hello"]},
    "object_for_choices": {"choices": {"delta": {}}},
    "number_for_text": {"choices": [{"delta": {"content": 5}}]},
    "texts_for_ids": {"choices": [{"delta": {"content": "a"}, "token_ids": ["a"]}]},
    "text_for_usage": {"choices": [], "usage": "3 tokens"},
}
# What the JSON of an event may hold that not everything can be done with.
BROKEN_EVENTS: dict[str, str] = {
    "many_digits": '{"choices": [], "a": ' + "9" * 5000 + "}",
    "deep": "[" * 100_000,
    "half_a_character": '{"choices": [{"delta": {"content": "\\ud83d"}}]}',
    "error_of_half_a_character": '{"error": {"message": "\\ud83d"}}',
}
ODD_USAGES: dict[str, Any] = {
    "usage_above_the_limit": {"prompt_tokens": 5, "completion_tokens": 65},
    "usage_beyond_floats": {"prompt_tokens": 5, "completion_tokens": 10**400},
    "prompt_beyond_floats": {"prompt_tokens": 10**400, "completion_tokens": 3},
    "usage_without_answer": {"prompt_tokens": 5},
    "usage_of_nothing": {"prompt_tokens": 5, "completion_tokens": 0},
    "usage_in_words": {"prompt_tokens": 5, "completion_tokens": "three"},
    "prompt_in_words": {"prompt_tokens": "five", "completion_tokens": 3},
}


@dataclass
class FakeServer:
    """behave: one behaviour a request, in the order of arrival; the last one goes on. tokens: the answer's words.

    Every request drafts 2 tokens in each of 2 steps and has 1 accepted in the first.
    """

    behave: Sequence[str] = ("ok",)
    tokens: Sequence[str] = ("one", " two", " three")
    chat_only: bool = False
    with_metrics: bool = True
    can_reset: bool = False
    counts_anew_at: int | None = None  # the request before which the counters begin at 0 again
    version: str = "1.2.3"
    bodies: list[dict[str, Any]] = field(default_factory=list)
    most_at_once: int = 0
    resets: int = 0
    url: str = ""
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def enter(self, body: dict[str, Any]) -> str:
        with self._lock:
            self.bodies.append(body)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            return self.behave[min(len(self.bodies), len(self.behave)) - 1]

    def leave(self) -> None:
        with self._lock:
            self._now -= 1

    def metrics(self) -> str:
        n = len(self.bodies)
        if self.counts_anew_at is not None and n >= self.counts_anew_at:
            n -= self.counts_anew_at - 1
        labels = 'model_name="fake",engine="0"'
        return "\n".join(
            [
                "# HELP vllm:spec_decode_num_drafts_total Number of drafts.",
                f"vllm:spec_decode_num_drafts_total{{{labels}}} {2.0 * n}",
                f"vllm:spec_decode_num_draft_tokens_total{{{labels}}} {4.0 * n}",
                f"vllm:spec_decode_num_accepted_tokens_total{{{labels}}} {1.0 * n}",
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="0"}} {1.0 * n}',
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="1"}} 0.0',
                f"vllm:prefix_cache_queries_total{{{labels}}} {10.0 * n}",
                f"vllm:prefix_cache_hits_total{{{labels}}} {3.0 * n}",
            ]
        )


def handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

        def answer(self, status: int, content: str, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content.encode())))
            self.end_headers()
            self.wfile.write(content.encode())

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self.answer(200, json.dumps({"data": [{"id": "fake", "max_model_len": 512}]}))
            elif self.path == "/version":
                self.answer(200, json.dumps({"version": server.version}))
            elif self.path == "/health":
                self.answer(200, "")
            elif self.path == "/metrics" and server.with_metrics:
                self.answer(200, server.metrics(), "text/plain")
            else:
                self.answer(404, "{}")

        def do_POST(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            content = self.rfile.read(length)
            if self.path == "/reset_prefix_cache":
                server.resets += 1
                self.answer(200 if server.can_reset else 404, "{}")
                return
            body = json.loads(content)
            behaviour = server.enter(body)
            try:
                self.stream(body, behaviour)
            except (BrokenPipeError, ConnectionResetError):
                pass
            finally:
                server.leave()
                self.close_connection = True

        def event(self, data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()

        def stream(self, body: dict[str, Any], behaviour: str) -> None:
            if behaviour == "http_500":
                self.answer(500, '{"error": {"message": "out of memory"}}')
                return
            if behaviour == "drop":
                self.connection.close()
                return
            chat = self.path == "/v1/chat/completions"
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.wfile.write(b": ping\n\n")
            if chat:
                self.event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
            if behaviour == "not_json":
                self.event("{oops")
                return
            if behaviour == "empty":
                self.event("[DONE]")
                return
            if behaviour in ODD_EVENTS or behaviour in BROKEN_EVENTS:
                self.event(ODD_EVENTS.get(behaviour) or BROKEN_EVENTS[behaviour])
                self.event("[DONE]")
                return
            for index, word in enumerate(server.tokens):
                if index and behaviour == "stall":
                    time.sleep(1.5)
                if index and behaviour == "slow":
                    time.sleep(0.15)
                if index and behaviour == "error_event":
                    self.event({"error": {"message": "the engine died", "code": 500}})
                    return
                if index == 2 and behaviour == "cut_off":
                    return
                piece = {"delta": {"content": word}} if chat else {"text": word}
                ids = {"token_ids": [index + 7]} if body.get("return_token_ids") else {}
                self.event({"choices": [{"index": 0, **piece, **ids, "finish_reason": None}], "usage": None})
            piece = {"delta": {}} if chat else {"text": ""}
            reason = behaviour if behaviour in ("abort", "error") else "stop"
            self.event({"choices": [{"index": 0, **piece, "finish_reason": reason}]})
            if behaviour != "no_usage":
                whole = {"prompt_tokens": 5, "completion_tokens": len(server.tokens)}
                usage = ODD_USAGES.get(behaviour, whole)
                self.event({"choices": [], "usage": usage})
            self.event("[DONE]")

    return Handler


@contextmanager
def fake_server(**settings: Any) -> Iterator[FakeServer]:
    """Runs until the block ends."""
    fake = FakeServer(**settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(fake))
    server.daemon_threads = True
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
