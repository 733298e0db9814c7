"""What pydantic found wrong with a body, told to whoever wrote it: field, value, what was expected."""

from __future__ import annotations

import reprlib
from typing import Any

from fastapi.exceptions import RequestValidationError

from peagle.server.errors import ApiError, bad_request
from peagle.server.protocol import MAX_STOP_CHARACTERS, MAX_STOP_LENGTH, MAX_STOP_STRINGS

# Of a union pydantic reports each alternative under a name of its own, and none of them says what the others are.
EXPECTED = {
    "stop": f"a string or a list of at most {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_LENGTH} characters, and of "
    f"{MAX_STOP_CHARACTERS} together",
    "content": "a text, or a list of {'type': 'text', 'text': ...}; this server reads nothing but text",
    "tools": "none; this server calls no tools",
}

MOST_OF_A_NAME = 100  # characters
MOST_OF_A_VALUE = 300


def validation_error(error: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body, with the field's name. There are never many: see `wrong_values`."""
    first = error.errors()[0]
    kind, text, value = first["type"], str(first["msg"]), first.get("input")
    # an unknown field may have a name of megabytes
    path = [part[:MOST_OF_A_NAME] if isinstance(part, str) else part for part in first["loc"] if part != "body"]
    if kind == "json_invalid":
        return bad_request(None, f"the body is not valid JSON: {first.get('ctx', {}).get('error', text)}")
    if not path:
        return bad_request(None, f"body: {_wrong_body(kind, value)}")
    name = str(path[0])
    where = ".".join(map(str, path))
    if kind == "extra_forbidden":
        return bad_request(name, f"{where}: unknown field, expected only fields of this server's API", "unknown_field")
    if kind == "missing":
        return bad_request(name, f"{where}: missing")
    if kind == "prompt":
        return bad_request(name, f"{where}: {text}")
    # a union's first report has the whole field's value, whatever is wrong with it
    expected = text.replace("Input should be", "expected", 1)
    at = 2 if name == "messages" else 0
    if at < len(path) and path[at] in EXPECTED:
        where, expected = ".".join(map(str, path[: at + 1])), f"expected {EXPECTED[str(path[at])]}"
    return bad_request(name, f"{where}: got {reprlib.repr(value)[:MOST_OF_A_VALUE]}, {expected}")


def _wrong_body(kind: str, value: Any) -> str:
    if kind == "missing":
        return "missing, expected a JSON object"
    if isinstance(value, bytes):  # FastAPI parses JSON only where the header says that it is
        return "expected a JSON object with the header Content-Type: application/json"
    return f"got {reprlib.repr(value)}, expected a JSON object"
