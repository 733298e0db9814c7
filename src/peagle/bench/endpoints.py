"""A server's counters, and whether its cache can be emptied."""

from __future__ import annotations

import httpx

from peagle.bench.counters import Counters, parse_counters
from peagle.client.server_facts import ASK_SECONDS, key_headers


def read_counters(url: str, api_key: str | None = None) -> Counters | None:
    """From /metrics; None where there is none."""
    try:
        response = httpx.get(f"{url}/metrics", headers=key_headers(api_key), timeout=ASK_SECONDS, trust_env=False)
    except httpx.HTTPError:
        return None
    return parse_counters(response.text) if response.status_code == 200 else None


def reset_prefix_cache(url: str, api_key: str | None = None) -> bool:
    """Empty the prefix cache through vLLM's development route; False where the server has none."""
    try:
        response = httpx.post(
            f"{url}/reset_prefix_cache", headers=key_headers(api_key), timeout=ASK_SECONDS, trust_env=False
        )
    except httpx.HTTPError:
        return False
    return response.status_code == 200
