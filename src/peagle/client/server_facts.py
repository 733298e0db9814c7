"""What a server says about itself: its model, the model's length, its version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from peagle.errors import InputError

ASK_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """model: the first that it lists. max_model_len and version are None where it does not tell."""

    model: str
    max_model_len: int | None
    version: str | None


def root_url(url: str) -> str:
    """`http://host:8000/v1/` -> `http://host:8000`."""
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--endpoint {url}: expected a URL that begins with http:// or https://")
    return url.rstrip("/").removesuffix("/v1")


def key_headers(api_key: str | None) -> dict[str, str]:
    """The header that brings an API key, if there is one."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def read_server(url: str, api_key: str | None = None) -> ServerFacts:
    """Raises InputError with the reason when the server is down, refuses or serves no model."""
    try:
        response = httpx.get(f"{url}/v1/models", headers=key_headers(api_key), timeout=ASK_SECONDS, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise InputError(f"endpoint {url}: no answer from /v1/models ({type(error).__name__}: {error})")
    if response.status_code != 200:
        raise InputError(
            f"endpoint {url}: /v1/models answered {response.status_code}, expected 200: {response.text.strip()[:300]}"
        )
    try:
        models: list[dict[str, Any]] = response.json()["data"]
        first = models[0]
        name = str(first["id"])
        length = first.get("max_model_len")
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
        raise InputError(f"endpoint {url}: /v1/models names no model: {response.text.strip()[:300]}")
    is_length = isinstance(length, int) and not isinstance(length, bool) and length > 0
    return ServerFacts(name, length if is_length else None, read_version(url, api_key))


def read_version(url: str, api_key: str | None = None) -> str | None:
    """From /version, which vLLM and this project's server have."""
    try:
        response = httpx.get(f"{url}/version", headers=key_headers(api_key), timeout=ASK_SECONDS, trust_env=False)
        return str(response.json()["version"]) if response.status_code == 200 else None
    except (httpx.HTTPError, ValueError, KeyError, TypeError, RecursionError):
        return None
