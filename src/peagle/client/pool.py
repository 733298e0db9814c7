"""HTTP clients, one for each request in flight.

One httpx client for all looks through every connection it has whenever one is asked for or given back: with 64 of them
a request costs 12 ms, more than a fast server takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx


class ClientPool:
    """Clients that keep their connections, as many as are used at once; `aclose` it."""

    def __init__(self, timeout: httpx.Timeout, headers: Mapping[str, str], ready: int = 0) -> None:
        """ready: how many are made now and not when they are first needed."""
        self._timeout, self._headers = timeout, dict(headers)
        self._context = httpx.create_ssl_context(trust_env=False)  # takes longest, and all may share it
        self._clients = [self._new() for _ in range(ready)]
        self._free = list(self._clients)

    def _new(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=self._timeout, headers=self._headers, verify=self._context, trust_env=False)

    @contextmanager
    def client(self) -> Iterator[httpx.AsyncClient]:
        """One that nobody else uses meanwhile."""
        if not self._free:
            self._clients.append(self._new())
            self._free.append(self._clients[-1])
        client = self._free.pop()
        try:
            yield client
        finally:
            self._free.append(client)

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()
