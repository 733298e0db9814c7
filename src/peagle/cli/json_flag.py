"""Flags whose value is a JSON object."""

import json
from typing import Any

from peagle.errors import InputError


def json_object(text: str, flag: str) -> dict[str, Any]:
    """The object in `text`. Raises InputError, naming the flag."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{flag}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{flag}: expected a JSON object, got {text!r}")
    return value
