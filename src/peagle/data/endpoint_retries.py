"""When a request to a server is tried again, and after how long."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field

from peagle.client.stream import StatusError
from peagle.data.request_queue import EndpointError

TRY_AGAIN = (408, 409, 425, 429)  # and everything from 500
# These say that no request can succeed: no valid key, no credit, no such model or route.
HOPELESS = (401, 402, 404, 405)
MESSAGE_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class EndpointSettings:
    """Where and how to ask.

    url: without /v1. stall_timeout: seconds of silence after which a request is tried again. A request is tried
    again `max_retries` times, after first_delay seconds and then twice as long each time, up to longest_delay; what a
    server asks for in Retry-After is waited for, up to longest_told.
    """

    url: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    stall_timeout: float = 300.0
    max_retries: int = 6
    first_delay: float = 1.0
    longest_delay: float = 60.0
    longest_told: float = 600.0


def raise_if_final(error: StatusError, url: str) -> None:
    """Raise for a status that trying again will not change: `error` if it is a refusal of this request, EndpointError
    if it says that none can succeed."""
    if error.status in HOPELESS or error.status < 400:
        raise EndpointError(f"endpoint {url}: {error.status}: {said(str(error))}")
    if error.status < 500 and error.status not in TRY_AGAIN:
        raise error


def delay_before(failures: int, told: float | None, settings: EndpointSettings) -> float:
    """Seconds to wait after so many failures, doubling, up to a quarter off so that requests which failed together do
    not come back together; at least what the server told."""
    delay = min(settings.first_delay * 2 ** (failures - 1), settings.longest_delay)
    return max(delay * random.uniform(0.75, 1.0), told or 0.0)


def said(body: str) -> str:
    """The message in an error's body, as OpenAI's API and its likes write it, or the body's beginning."""
    try:
        found = json.loads(body)
        found = found.get("error", found)
        found = found.get("message", found) if isinstance(found, dict) else found
    except (ValueError, AttributeError):
        found = body
    return str(found)[:MESSAGE_CHARACTERS]


def retry_after(error: StatusError) -> float | None:
    """Seconds that the server asks to wait, None if it does not say so in seconds."""
    try:
        return max(float(error.headers.get("retry-after", "")), 0.0)
    except ValueError:  # none, or a date, which would need clocks that agree
        return None
