"""Limits on the bodies of requests: bytes, values to parse, and what is held of bodies that are on their way."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import Message, Receive

from peagle.server.errors import ApiError, bad_request

BODY_BYTES_A_TOKEN = 512  # of the longest request: many times what its text or ids take
MIN_BODY_BYTES, MAX_BODY_BYTES = 2 * 2**20, 32 * 2**20
# Parsing stops the event loop, and it takes time by the number of values, not by the bytes. Text has few of the first
# (brackets, and colons behind the keys); commas stand between token ids, of which `MAX_PROMPT_ITEMS` are allowed.
MAX_BRACKETS = 2**18
MAX_COMMAS = 2**21
UNFINISHED_BODIES = 8  # of the largest size, over all connections, so much may be held before it can be read


def most_body_bytes(max_model_len: int) -> int:
    """How large a body may be: a server of short requests needs no large ones."""
    return min(max(BODY_BYTES_A_TOKEN * max_model_len, MIN_BODY_BYTES), MAX_BODY_BYTES)


class RefusedBody(HTTPException):
    """A body that is not read further; FastAPI lets no other kind of error through while it reads one."""

    def __init__(self, error: ApiError) -> None:
        super().__init__(error.status, str(error))
        self.error = error


class Unfinished:
    """Bytes of the bodies that are on their way, over all connections."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.held = 0


class LimitedReceive:
    """One request's `receive`, which raises RefusedBody for what the server would not want to parse or hold. Its bytes
    count as unfinished until the last one is there, or `close`."""

    def __init__(self, receive: Receive, max_bytes: int, unfinished: Unfinished) -> None:
        self._receive = receive
        self._max_bytes = max_bytes
        self._unfinished = unfinished
        self._bytes = self._brackets = self._commas = 0
        self._held = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        part = message.get("body", b"")
        self._bytes += len(part)
        self._brackets += part.count(b"[") + part.count(b"{") + part.count(b":")
        self._commas += part.count(b",")
        if self._bytes > self._max_bytes:
            raise RefusedBody(too_large(f"more than {self._max_bytes}", self._max_bytes))
        if self._brackets > MAX_BRACKETS or self._commas > MAX_COMMAS:
            raise RefusedBody(
                bad_request(
                    None,
                    f"body: got {self._brackets} of the characters [, {{ and : and {self._commas} commas, expected at "
                    f"most {MAX_BRACKETS} and {MAX_COMMAS}",
                )
            )
        if message.get("more_body", False):
            self._hold(len(part))
        else:
            self.close()
        return message

    def _hold(self, count: int) -> None:
        if self._unfinished.held + count > self._unfinished.most:
            raise RefusedBody(bodies_full(self._unfinished.held, self._unfinished.most))
        self._unfinished.held += count
        self._held += count

    def close(self) -> None:
        self._unfinished.held -= self._held
        self._held = 0


def too_large(got: str, most: int) -> ApiError:
    return ApiError(
        413,
        f"the body has {got} bytes, expected at most {most}: {BODY_BYTES_A_TOKEN} a token of the maximum context "
        f"length, from {MIN_BODY_BYTES} to {MAX_BODY_BYTES}",
    )


def bodies_full(held: int, most: int) -> ApiError:
    return ApiError(
        429,
        f"{held} bytes of unfinished bodies are held, and the server takes {most} at most; try again later",
        code="bodies_full",
        type="rate_limit_error",
        retry_after=1,
    )
