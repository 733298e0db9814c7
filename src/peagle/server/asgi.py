"""What lies under the routes: the API key, bodies within their limits, and noticing that a client has gone."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from peagle.server.bodies import UNFINISHED_BODIES, LimitedReceive, Unfinished, most_body_bytes, too_large
from peagle.server.errors import ApiError

T = TypeVar("T")
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

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_model_len: int) -> None:
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]
        self.max_body = most_body_bytes(max_model_len)
        self.unfinished = Unfinished(UNFINISHED_BODIES * self.max_body)

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
        if length.isdigit() and int(length) > self.max_body:
            await error_response(too_large(str(int(length)), self.max_body))(scope, receive, send)
            return
        body = LimitedReceive(receive, self.max_body, self.unfinished)
        try:
            await self.app(scope, body, send)
        finally:  # the client may have gone in the middle
            body.close()

    def _knows(self, authorization: bytes) -> bool:
        scheme, _, given = authorization.partition(b" ")
        # every key is compared, so that the time says nothing
        found = [hmac.compare_digest(given.strip(), key) for key in self.api_keys]
        return scheme.lower() == b"bearer" and any(found)
