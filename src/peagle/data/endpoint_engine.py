"""A server as the engine that generating data asks: requests side by side, tried again, refusals told apart."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import httpx
from tqdm import tqdm

from peagle.client.pool import ClientPool
from peagle.client.server_facts import key_headers
from peagle.client.stream import StatusError, StreamError
from peagle.data.completions import (
    AnswerTokens,
    InexactAnswer,
    Received,
    exact_tokens,
    receive,
    request_body,
)
from peagle.data.endpoint_retries import EndpointSettings, delay_before, raise_if_final, retry_after, said
from peagle.data.request_queue import EndpointError, Refusal
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError

CONNECT_SECONDS = 10.0
GIVE_UP_AFTER = 3  # requests in a row, no answer between them, each tried as often as it may be
SAY_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class EndpointOutput:
    """One request's whole answer, or what the server said instead (finish_reason "refused" or "unanswered")."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: str
    refusal: Refusal | None = None
    finished: bool = True


class _Unanswered(Exception):
    """No answer after all tries. down: there was nobody to ask."""

    def __init__(self, message: str, down: bool):
        super().__init__(message)
        self.down = down


class EndpointEngine:
    """An `EngineLike` over a server. It answers as many requests at once as are added; `close` it in any case.

    Attributes:
        extensions: whether requests bring vLLM's fields; `probe` finds out.
        gives_token_ids: whether the server tells token ids, so far as is known.
        retries: how often something was tried again, by reason.
    """

    def __init__(self, settings: EndpointSettings, answer: AnswerTokens, loop_limit: int = 0):
        self.settings = settings
        self.extensions = True
        self.gives_token_ids = False
        self.retries: Counter[str] = Counter()
        self._answer_tokens = answer
        self._loop_limit = loop_limit
        self._url = f"{settings.url}/v1/completions"
        self._answered = 0
        self._given_up = 0  # in a row
        self._said_at = float("-inf")
        self._error: EndpointError | None = None
        self._tasks: dict[str, asyncio.Task[EndpointOutput]] = {}
        # It runs while `step` waits; in between the kernel keeps what arrives.
        self._loop = asyncio.new_event_loop()
        timeout = httpx.Timeout(settings.stall_timeout, connect=CONNECT_SECONDS, pool=None)
        self._clients = ClientPool(timeout, key_headers(settings.api_key))

    def probe(self, prompt: list[int], params: SamplingParams) -> None:
        """Ask once, to learn what the server takes and tells.

        Raises:
            InputError: it cannot answer for this target, or is down.
        """
        try:
            received = self._loop.run_until_complete(self._probe(prompt, params))
        except StatusError as error:
            raise InputError(
                f"endpoint {self.settings.url}: refuses a completion of token ids ({error.status}: {said(str(error))})"
            ) from error
        except _Unanswered as error:
            raise InputError(f"endpoint {self.settings.url}: {error}") from error
        self.gives_token_ids = received.token_ids is not None

    async def _probe(self, prompt: list[int], params: SamplingParams) -> Received:
        try:
            return await self._persist(request_body(self.settings.model, prompt, params, True))
        except StatusError as error:
            if error.status not in (400, 422):
                raise
        self.extensions = False
        return await self._persist(request_body(self.settings.model, prompt, params, False))

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Start a request. Raises InputError for parameters that the server refuses."""
        body = request_body(self.settings.model, prompt_token_ids, params, self.extensions)
        self._tasks[request_id] = self._loop.create_task(self._request(request_id, body, params))

    def abort(self, request_id: str) -> bool:
        """Drop a request; False if it has ended."""
        task = self._tasks.pop(request_id, None)
        if task is None:
            return False
        task.cancel()
        return True

    def step(self) -> list[EndpointOutput]:
        """Wait until a request has ended; all that have.

        Raises:
            EndpointError: the server is down, or not one that can answer for this target.
        """
        if self._error is not None:
            raise self._error
        if not self._tasks:
            return []
        waiting = asyncio.wait(self._tasks.values(), return_when=asyncio.FIRST_COMPLETED)
        self._loop.run_until_complete(waiting)
        outputs = []
        for request_id, task in [item for item in self._tasks.items() if item[1].done()]:
            del self._tasks[request_id]
            error = task.exception()
            if error is None:
                outputs.append(task.result())
            elif isinstance(error, EndpointError):
                self._error = error  # told by the next step: others that ended beside it are answers
            else:
                raise error
        return outputs

    def close(self) -> None:
        """Drop what runs and close the connections."""
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.exception()  # looked at, or asyncio complains that nobody has
        if tasks:
            self._loop.run_until_complete(asyncio.wait(tasks))
        self._loop.run_until_complete(self._clients.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    def line(self) -> str:
        """What was tried again, for the summary; empty if nothing was."""
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.retries.most_common())
        return f"endpoint: requests tried again: {reasons}" if reasons else ""

    async def _request(self, request_id: str, body: dict[str, Any], params: SamplingParams) -> EndpointOutput:
        try:
            received = await self._persist(body)
            if received.finish_reason == "content_filter":
                return EndpointOutput(request_id, [], "refused", Refusal(200, "content_filter"))
            ids, reason = exact_tokens(received, body["prompt"], params, self._answer_tokens)
        except StatusError as error:
            return EndpointOutput(request_id, [], "refused", Refusal(error.status, said(str(error))))
        except InexactAnswer as error:
            return EndpointOutput(request_id, [], "refused", Refusal(None, str(error)))
        except _Unanswered as error:
            self._given_up += 1
            if error.down or self._given_up >= GIVE_UP_AFTER:
                raise EndpointError(f"endpoint {self.settings.url}: {error}; the same command goes on from here")
            return EndpointOutput(request_id, [], "unanswered", Refusal(None, str(error)))
        return EndpointOutput(request_id, ids, reason)

    async def _persist(self, body: dict[str, Any]) -> Received:
        """Ask until there is an answer. Raises StatusError for a refusal, _Unanswered, EndpointError."""
        settings = self.settings
        failures, answered = 0, self._answered
        while True:
            told = None
            try:
                with self._clients.client() as client:
                    received = await receive(client, self._url, body, self._loop_limit)
                if received.finish_reason not in ("stop", "length", "loop", "content_filter"):
                    raise StreamError(f"the answer ended with finish_reason {received.finish_reason!r}")
            except httpx.ReadTimeout:
                kind, message = "stall", f"nothing came for {settings.stall_timeout:g} s"
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                kind, message = "no connection", f"{type(error).__name__}: {error}"
            except httpx.HTTPError as error:
                kind, message = "connection", f"{type(error).__name__}: {error}"
            except StreamError as error:
                if error.code is not None and error.code >= 400:
                    raise_if_final(StatusError(error.code, str(error), {}), settings.url)
                kind, message = "broken stream", str(error)
            except StatusError as error:
                raise_if_final(error, settings.url)
                kind, message, told = str(error.status), f"{error.status}: {said(str(error))}", retry_after(error)
                if error.status == 429 and self._answered > answered:
                    failures = 0  # the server works, it only has no room
            else:
                self._answered += 1
                self._given_up = 0
                return received
            answered, failures = self._answered, failures + 1
            if failures > settings.max_retries or (told or 0) > settings.longest_told:
                wait = f", which asks for {told:g} s of patience" if told else ""
                raise _Unanswered(
                    f"no answer in {failures} tries{wait}; the last one: {message}", kind == "no connection"
                )
            self.retries[kind] += 1
            delay = delay_before(failures, told, settings)
            self._say(f"endpoint {settings.url}: {message}; trying again in {delay:.0f} s")
            await asyncio.sleep(delay)

    def _say(self, text: str) -> None:
        if time.monotonic() - self._said_at > SAY_SECONDS:
            self._said_at = time.monotonic()
            tqdm.write(text, file=sys.stderr)
