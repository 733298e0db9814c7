"""Flags whose value is JSON."""

import json
from typing import Any

from peagle.errors import InputError


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The object in `text`. Raises InputError, naming the flag."""
    value = _json(text, flag)
    if not isinstance(value, dict):
        raise InputError(f"{flag}: expected a JSON object, got {text!r}")
    return value


def json_strings(text: str, flag: str) -> tuple[str, ...]:
    """The list of strings in `text`. Raises InputError, naming the flag."""
    value = _json(text, flag)
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise InputError(f"{flag}: got {text!r}, expected a JSON list of strings")
    return tuple(value)


def _json(text: str, flag: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{flag}: not JSON: {error}") from error
