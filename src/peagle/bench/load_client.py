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

from peagle.bench.answer_chunks import check_end, chunk_usage, count_tokens, take_tokens
from peagle.bench.questions import Question, Questions
from peagle.bench.records import Failure, Record, Run
from peagle.client.pool import ClientPool
from peagle.client.server_facts import key_headers
from peagle.client.stream import StatusError, StreamError, joined_text, printable_text, stream_chunks

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


def token_limit(body: Mapping[str, Any]) -> int | None:
    """The most tokens that a request lets its answer have; of both fields, as servers take either, the larger."""
    told = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    return max((limit for limit in told if isinstance(limit, int)), default=None)


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
    except RecursionError:  # an event that could be read, and is too deep to be looked at
        _fail(record, "stream", "an event is nested too deeply")
    return record


def _fail(record: Record, failure: Failure, error: str) -> None:
    record.failure, record.error = failure, printable_text(error)[:ERROR_CHARACTERS]
    record.text = printable_text(record.text)


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
        had_ended = record.finish_reason is not None
        brought = take_tokens(record, chunk)
        spoke = spoke or brought
        ends = record.finish_reason is not None and not had_ended
        # the last token may show no text (an end token): where the end comes later than the others, it came with it
        if brought or (ends and now > arrived):
            if arrived:
                record.itls.append(now - arrived)
            else:
                record.ttft = now - started
            arrived = now
            record.latency = now - started
    if record.finish_reason is None and not done:
        raise StreamError("the stream ended before the answer did")
    check_end(record)
    if not arrived:
        raise StreamError("the answer has no token")
    record.text = joined_text(record.text)
    count_tokens(record, usage, spoke, token_limit(body))
