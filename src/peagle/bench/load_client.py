"""A closed loop of users against an OpenAI-compatible server: C conversations at a time, each turn after the last.

Every request leaves a record. One that fails says how; nothing is retried, because a retry would hide what users see.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from peagle.bench.questions import Question, Questions
from peagle.bench.records import Failure, Record, Run
from peagle.client.pool import ClientPool
from peagle.client.server_facts import key_headers
from peagle.client.stream import StatusError, StreamError, stream_chunks

ERROR_CHARACTERS = 500
CONNECT_SECONDS = 10.0
OnRecord = Callable[[Record], None]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are chosen. A seed is sent only where it matters; each request then gets its own."""

    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where and how to ask. url: without /v1. stall_timeout: the longest silence, request_timeout: the longest request,
    seconds. give_up_after: so many failures in a row end the arm; the rest is recorded as not sent."""

    url: str
    model: str
    api: Literal["completions", "chat"]
    api_key: str | None = field(default=None, repr=False)
    return_token_ids: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    stall_timeout: float = 120.0
    request_timeout: float = 1800.0
    give_up_after: int = 10

    @property
    def headers(self) -> dict[str, str]:
        return key_headers(self.api_key)


def run_load(
    endpoint: Endpoint,
    questions: Questions,
    concurrency: int,
    sampling: Sampling,
    on_record: OnRecord | None = None,
    limit: int | None = None,
) -> Run:
    """Ask all conversations, `concurrency` at a time, in the workload's order; limit: only the first so many.

    Blocks until the last is answered or has failed. The run's acceptance counters are the caller's to add.
    """
    return asyncio.run(_run(endpoint, questions, concurrency, sampling, on_record, limit))


async def _run(
    endpoint: Endpoint,
    questions: Questions,
    concurrency: int,
    sampling: Sampling,
    on_record: OnRecord | None,
    limit: int | None,
) -> Run:
    waiting = iter(range(min(len(questions), limit or len(questions))))
    run = Run([], 0.0)
    skipped_before, failed_in_a_row = questions.num_skipped, 0
    timeout = httpx.Timeout(endpoint.stall_timeout, connect=min(CONNECT_SECONDS, endpoint.stall_timeout), pool=None)
    async with aclosing(ClientPool(timeout, endpoint.headers, concurrency)) as clients:

        async def user() -> None:
            nonlocal failed_in_a_row
            for conversation in waiting:
                question: Question | None = questions.first(conversation)
                while question is not None:
                    if failed_in_a_row >= endpoint.give_up_after:
                        record = Record(conversation, question.turn, time.perf_counter() - origin)
                        record.failure, record.error = "not_sent", f"{failed_in_a_row} requests failed in a row"
                    else:
                        body = request_body(endpoint, question, questions.workload.output_len is not None, sampling)
                        with clients.client() as client:
                            record = await _ask(client, endpoint, question, body, origin)
                        failed_in_a_row = 0 if record.failure is None else failed_in_a_row + 1
                    run.records.append(record)
                    if on_record is not None:
                        on_record(record)
                    question = questions.after(question, record)

        origin = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(concurrency)))
        run.duration = time.perf_counter() - origin
    run.num_skipped = questions.num_skipped - skipped_before
    run.sort()
    return run


def request_body(endpoint: Endpoint, question: Question, exact_length: bool, sampling: Sampling) -> dict[str, Any]:
    """The JSON of one request; exact_length keeps an end-of-sequence token from ending the answer (vLLM's fields)."""
    body: dict[str, Any] = {"model": endpoint.model, "stream": True, "stream_options": {"include_usage": True}}
    if endpoint.api == "chat":
        body |= {"messages": list(question.messages or ()), "max_completion_tokens": question.max_tokens}
    else:
        body |= {"prompt": list(question.token_ids or ()), "max_tokens": question.max_tokens}
    body["temperature"] = sampling.temperature
    if sampling.temperature > 0:
        body["seed"] = sampling.seed + 1_000 * question.conversation + question.turn
    if exact_length:
        body |= {"ignore_eos": True, "min_tokens": question.max_tokens}
    if endpoint.return_token_ids:
        body["return_token_ids"] = True
    return body | dict(endpoint.extra_body)


async def _ask(
    client: httpx.AsyncClient, endpoint: Endpoint, question: Question, body: dict[str, Any], origin: float
) -> Record:
    """One request from its first byte to its last; errors end up in the record."""
    record = Record(question.conversation, question.turn, time.perf_counter() - origin)
    try:
        async with asyncio.timeout(endpoint.request_timeout):
            await _stream(client, endpoint, body, record, origin)
    except TimeoutError:
        _fail(record, "timeout", f"not complete after {endpoint.request_timeout:g} s")
    except httpx.ReadTimeout:
        _fail(record, "stall", f"nothing came for {endpoint.stall_timeout:g} s")
    except httpx.HTTPError as error:
        _fail(record, "connection", f"{type(error).__name__}: {error}")
    except StatusError as error:
        _fail(record, "http", f"{error.status}: {error}")
    except StreamError as error:
        _fail(record, "stream", str(error))
    return record


def _fail(record: Record, failure: Failure, error: str) -> None:
    record.failure, record.error = failure, error[:ERROR_CHARACTERS]


async def _stream(
    client: httpx.AsyncClient, endpoint: Endpoint, body: dict[str, Any], record: Record, origin: float
) -> None:
    path = "/v1/chat/completions" if endpoint.api == "chat" else "/v1/completions"
    started = record.start + origin
    usage, done, arrived, spoke = None, False, 0.0, False
    async for now, chunk in stream_chunks(client, endpoint.url + path, body):
        if chunk is None:
            done = True
            continue
        usage = chunk_usage(chunk) or usage
        brought = take_tokens(record, chunk)
        spoke = spoke or brought
        # an answer's end counts as its token where nothing else came
        if brought or (record.finish_reason is not None and not arrived):
            if arrived:
                record.itls.append(now - arrived)
            else:
                record.ttft = now - started
            arrived = now
            record.latency = now - started
    if record.finish_reason is None and not done:
        raise StreamError("the stream ended before the answer did")
    if not arrived:
        raise StreamError("the answer has no token")
    count_tokens(record, usage, spoke)


def chunk_usage(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The token counts that a chunk brings, if any. Raises StreamError for what is none."""
    usage = chunk.get("usage")
    if usage is not None and not isinstance(usage, dict):
        raise StreamError(f"usage is no object: {str(usage)[:200]}")
    return usage


def count_tokens(record: Record, usage: dict[str, Any] | None, spoke: bool) -> None:
    """Of prompt and answer, by the server's usage; the answer's ids are counted where it says nothing. spoke: text or
    ids came. Raises StreamError where nothing tells, or where what came has no token."""
    told = (usage or {}).get("completion_tokens")
    if told is None and record.token_ids is not None:
        told = len(record.token_ids)
    if told is None:
        lacks = "no usage" if usage is None else "no completion_tokens in the usage"
        raise StreamError(f"{lacks} in the stream, so the answer's tokens cannot be counted")
    if not _is_count(told) or (told == 0 and spoke):
        raise StreamError(f"usage: completion_tokens is {str(told)[:80]}, expected the answer's tokens")
    prompt = (usage or {}).get("prompt_tokens")
    if prompt is not None and not _is_count(prompt):
        raise StreamError(f"usage: prompt_tokens is {str(prompt)[:80]}, expected a whole number")
    record.output_tokens = told
    record.prompt_tokens = prompt or 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def take_tokens(record: Record, chunk: dict[str, Any]) -> bool:
    """Add what a chunk brings to the record; whether it brought tokens. A chat's opening role chunk brings none.

    Some tokens show no text (half a character, a special token): they count where ids are told. Raises StreamError for
    a chunk of another shape than the API's.
    """
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise _odd(chunk)
    if not choices:
        return False
    choice = choices[0]
    delta = choice.get("delta") or {}
    if not isinstance(delta, dict):
        raise _odd(chunk)
    text = choice.get("text") or delta.get("content") or ""
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    ids = choice.get("token_ids")
    if not isinstance(text, str) or not (ids is None or (isinstance(ids, list) and all(map(_is_count, ids)))):
        raise _odd(chunk)
    record.text += text
    if ids is not None:
        if record.token_ids is None:
            record.token_ids = []
        record.token_ids.extend(ids)
    if choice.get("finish_reason") is not None:
        record.finish_reason = str(choice["finish_reason"])
    return bool(text or thought or ids)


def _odd(chunk: dict[str, Any]) -> StreamError:
    return StreamError(f"an event is of another shape than the API's: {str(chunk)[:200]}")
