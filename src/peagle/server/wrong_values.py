"""Values that pydantic would take too long to find wrong: the first wrong element ends it, and lists have an end.

A union tries each of its branches on each element and makes an error of every one, so that a list of 300,000 wrong ones
would take gigabytes and stop the event loop for seconds.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, NoReturn

from pydantic_core import PydanticCustomError

INTEGERS = 2**63  # integers of requests are below this, as machines have them
MAX_PROMPT_ITEMS = 2**20  # prompts and token ids together: more than any model's length or server's queue
PROMPT = "a text, a list of token ids (0 or more), or a list of texts or of such lists"


def checked_prompt(value: Any) -> str | list[Any]:
    """A plain completion's `prompt`, as it came. Raises PydanticCustomError of the type "prompt" with the whole text
    for the client."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(value)
    _check_length(len(value))
    kind = type(value[0]) if value else str
    if kind is int:
        _check_ids(value)
    elif kind not in (str, list) or any(type(one) is not kind for one in value):
        # each may be right alone, and they are wrong together
        _refuse(value)
    elif kind is list:
        _check_length(sum(map(len, value)))
        for ids in value:
            _check_ids(ids)
    return value


def _check_ids(ids: list[Any]) -> None:
    # without a loop of Python's own while all is well
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < INTEGERS):
        return
    at, wrong = next((at, one) for at, one in enumerate(ids) if type(one) is not int or not 0 <= one < INTEGERS)
    _refuse(wrong, f" at {at}")


def _check_length(length: int) -> None:
    if length > MAX_PROMPT_ITEMS:
        raise PydanticCustomError(
            "prompt", "got {got} elements, expected at most {most}", {"got": length, "most": MAX_PROMPT_ITEMS}
        )


def _refuse(value: Any, where: str = "") -> NoReturn:
    raise PydanticCustomError(
        "prompt", "got {got}{where}, expected " + PROMPT, {"got": reprlib.repr(value), "where": where}
    )


def at_most(count: int) -> Callable[[Any], Any]:
    """A validator of mappings that looks at their size before it looks at anything in them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > count:
            raise PydanticCustomError(
                "too_long", "expected at most {most} entries, not {got}", {"got": len(value), "most": count}
            )
        return value

    return check


def few_entries(count: int) -> Callable[[Any], Any]:
    """The same for what may hold anything: its entries count, and those of all lists and mappings in it."""

    def check(value: Any) -> Any:
        found, waiting = 0, [value]
        while waiting:
            one = waiting.pop()
            if isinstance(one, (dict, list)):
                found += len(one)
                if found > count:
                    raise PydanticCustomError(
                        "too_long", "expected at most {most} entries, with all that they hold", {"most": count}
                    )
                waiting += one.values() if isinstance(one, dict) else one
        return value

    return check


def few_parts(count: int) -> Callable[[Any], Any]:
    """A validator of messages that looks at the number of all their parts before it looks at any."""

    def check(value: Any) -> Any:
        if isinstance(value, list):
            contents = (message.get("content") for message in value if isinstance(message, dict))
            found = sum(len(content) for content in contents if isinstance(content, list))
            if found > count:
                raise PydanticCustomError(
                    "too_long",
                    "expected at most {most} parts of all messages together, not {got}",
                    {"got": found, "most": count},
                )
        return value

    return check
