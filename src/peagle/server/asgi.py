"""What lies under the routes: the API key, the limit on bodies, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import HTTPException
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from peagle.server.errors import ApiError

T = TypeVar("T")
MAX_BODY_BYTES = 32 * 2**20
OPEN_PATHS = ("/health", "/version", "/metrics")


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error.body, error.status, headers=error.headers)


async def unless_disconnected(
    receive: Receive, work: Coroutine[Any, Any, T], failed: asyncio.Future[ApiError] | None = None
) -> T:
    """The result of `work`, cancelled with ClientGone when the client disconnects first, or with the error that
    `failed` gets. The body must be read."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    ends: set[asyncio.Future[Any]] = {task, watch} if failed is None else {task, watch, failed}
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if failed is not None and failed.done():
            raise failed.result()
        raise ClientGone
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(Response):
    """Server-sent events until they end or the client goes; then `close` is called in any case."""

    def __init__(self, events: AsyncIterator[bytes], close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(receive, self._send_all(send))
        except ClientGone:
            pass
        finally:
            self._close()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for data in self._events:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Guard:
    """ASGI middleware: refuses requests without one of the API keys, and bodies that are too large."""

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        if self.api_keys and scope["path"] not in OPEN_PATHS and not self._knows(headers.get(b"authorization", b"")):
            error = ApiError(
                401, "incorrect API key provided, expected Authorization: Bearer KEY", code="invalid_api_key"
            )
            await error_response(error)(scope, receive, send)
            return
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > MAX_BODY_BYTES:
            error = ApiError(413, f"the body has {int(length)} bytes, expected at most {MAX_BODY_BYTES}")
            await error_response(error)(scope, receive, send)
            return
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > MAX_BODY_BYTES:
                raise HTTPException(413, f"the body has more than {MAX_BODY_BYTES} bytes")  # the only kind let through
            return message

        await self.app(scope, limited, send)

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        # every key is compared, so that the time says nothing
        found = [hmac.compare_digest(given.strip(), key) for key in self.api_keys]
        return scheme.lower() == b"bearer" and any(found)
