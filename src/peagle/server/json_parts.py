"""JSON made in parts, so that the event loop serves others while a long one is made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from peagle.engine.outputs import PositionLogprobs

P = TypeVar("P", PositionLogprobs, PositionLogprobs | None)
# made once: there is a chunk a step of every stream
encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
encode_utf8 = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode
# Reported tokens that are put into their form and encoded at a time, some hundredths of a second; then the event loop
# serves others. The whole of a long prompt's report would take seconds.
SLICE = 8192


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + spliced(data) + b"\n\n"


def spliced(fields: dict[str, Any], dumps: Callable[[Any], str] = encode) -> bytes:
    """A JSON object; bytes among its values are JSON already."""
    if bytes not in map(type, fields.values()):  # most have none, and one call is the fastest
        return dumps(fields).encode()
    found = (
        dumps(name).encode() + b":" + (value if isinstance(value, bytes) else dumps(value).encode())
        for name, value in fields.items()
    )
    return b"{%s}" % b",".join(found)


def joined(lists: list[str]) -> bytes:
    """One JSON list of several that are not empty."""
    return f"[{','.join(one[1:-1] for one in lists)}]".encode()


async def slices(positions: Sequence[P]) -> AsyncIterator[Sequence[P]]:
    """Positions of a report, so many at a time as have SLICE tokens; between two of them others get their turn."""
    if not positions:
        return
    width = max(len(positions[-1] or ()), 1)
    count = max(SLICE // width, 1)
    for start in range(0, len(positions), count):
        if start:
            await asyncio.sleep(0)
        yield positions[start : start + count]
