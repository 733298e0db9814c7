"""What a Prometheus scrape sees of HTTP: requests by path, method and class of status, as the instrumentation that vLLM
uses (prometheus-fastapi-instrumentator) names them."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

NOT_COUNTED = ("/metrics", "/health", "/version")
SECONDS = (0.1, 0.5, 1.0)
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))


class HttpMetrics:
    """Belongs to the event loop."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "http_requests",
            "Total number of requests by method, status and handler.",
            ["handler", "method", "status"],
            registry=registry,
        )
        self.seconds = Histogram(
            "http_request_duration_seconds",
            "Latency of requests by handler and method, streamed answers to their end.",
            ["handler", "method"],
            buckets=SECONDS,
            registry=registry,
        )


class CountRequests:
    """ASGI middleware: counts every request but those that watch the server itself."""

    def __init__(self, app: ASGIApp, metrics: HttpMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in NOT_COUNTED:
            await self.app(scope, receive, send)
            return
        status, began = 500, time.monotonic()  # what the client sees when nothing has been sent

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            # the route's own form, not the path that was asked for: there are endlessly many of these, and of methods
            handler = getattr(scope.get("route"), "path", "none")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.requests.labels(handler, method, f"{status // 100}xx").inc()
            self.metrics.seconds.labels(handler, method).observe(time.monotonic() - began)
