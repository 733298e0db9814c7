"""A streamed answer's chunks, and what can be wrong with them."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from typing import Any

import httpx

from peagle.client.sse import EventBuffer


class StreamError(Exception):
    """The stream is not, or does not hold, an answer. code: the status that an error in the stream brought, if any."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class StatusError(Exception):
    """The server answered with a status other than 200; the message is what it said."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers


async def stream_chunks(
    client: httpx.AsyncClient, url: str, body: Mapping[str, Any]
) -> AsyncGenerator[tuple[float, dict[str, Any] | None], None]:
    """Post `body` and yield (`time.perf_counter()` of arrival, chunk); for the end mark [DONE] the chunk is None.

    Raises StatusError, StreamError and httpx's errors.
    """
    events = EventBuffer()
    async with client.stream("POST", url, json=body) as response:
        if response.status_code != 200:
            text = (await response.aread()).decode("utf-8", "replace").strip()
            raise StatusError(response.status_code, text or response.reason_phrase, response.headers)
        pieces = response.aiter_bytes()
        try:
            async for received in pieces:
                now = time.perf_counter()
                for data in events.push(received):
                    yield now, None if data == "[DONE]" else parse_chunk(data)
        finally:
            await _end(response, pieces)


async def _end(response: httpx.Response, pieces: AsyncIterator[bytes]) -> None:
    """Close a response that may not have been read to its end, and the iterator over it."""
    await response.aclose()
    # httpx nests several generators, and `aclose` of the outer one leaves the inner ones to tasks that may outlive the
    # loop; the next read from a closed response ends all of them
    with suppress(httpx.HTTPError, httpx.StreamError):
        async for _ in pieces:
            pass


def parse_chunk(data: str) -> dict[str, Any]:
    """One event's JSON. Raises StreamError, also for an error that the server sends in the stream."""
    try:
        chunk = json.loads(data)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and brackets as deep
        raise StreamError(f"an event is no JSON ({getattr(error, 'msg', error)}): {data[:200]}")
    if not isinstance(chunk, dict):
        raise StreamError(f"an event is no object: {data[:200]}")
    if chunk.get("error") is not None or chunk.get("object") == "error":
        said = chunk.get("error") or chunk
        if not isinstance(said, dict):
            raise StreamError(str(said))
        code = said.get("code")
        raise StreamError(str(said.get("message", said)), code if isinstance(code, int) else None)
    return chunk


def joined_text(text: str) -> str:
    """An answer's text with its characters whole: JSON may bring the two halves of one (surrogates) as escapes of their
    own, in chunks of their own. Raises StreamError for a half without the other."""
    try:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
    except UnicodeDecodeError:
        raise StreamError("the text holds half a character (a surrogate without the other of its pair)")


def printable_text(text: str) -> str:
    """As `joined_text`, with U+FFFD for a half without the other: for what is shown and kept, whatever it is."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
