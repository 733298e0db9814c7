"""Clients for requests in flight: nobody shares one, and they are used again."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from peagle.client.pool import ClientPool


@pytest.mark.parametrize("ready", [0, 1, 3])
def test_no_two_requests_share_a_client(ready: int) -> None:
    async def use() -> None:
        pool = ClientPool(httpx.Timeout(1.0), {"authorization": "Bearer x"}, ready)
        with pool.client() as first, pool.client() as second:
            assert first is not second
            assert first.headers["authorization"] == "Bearer x"
        with pytest.raises(ValueError, match="broken"), pool.client():
            raise ValueError("broken")
        with pool.client() as third, pool.client() as fourth:
            assert {third, fourth} == {first, second} or ready == 3
        await pool.aclose()
        assert first.is_closed
        assert second.is_closed

    asyncio.run(use())
