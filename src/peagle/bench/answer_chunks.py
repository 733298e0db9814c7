"""What the chunks of an answer bring: text, token ids, the reason of its end, and the server's counts of tokens.

A server that says what cannot be is not measured by it: such an answer has failed.
"""

from __future__ import annotations

from typing import Any

from peagle.bench.records import Record
from peagle.client.stream import StreamError

MOST_TOKENS = 2**40  # no answer has more; sums and rates of what is no more than that can be computed and written
GIVEN_UP = ("abort", "error")  # vLLM's words for an answer that is not whole


def chunk_usage(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """The token counts that a chunk brings, if any. Raises StreamError for what is none."""
    usage = chunk.get("usage")
    if usage is not None and not isinstance(usage, dict):
        raise StreamError(f"usage is no object: {str(usage)[:200]}")
    return usage


def take_tokens(record: Record, chunk: dict[str, Any]) -> bool:
    """Add what a chunk brings to the record; whether it brought tokens. A chat's opening role chunk brings none.

    Some tokens show no text (half a character, a special token): they count where ids are told. Raises StreamError for
    a chunk of another shape than the API's.
    """
    choices = chunk.get("choices") or []
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise _odd(chunk)
    if not choices:
        return False
    choice = choices[0]
    delta = choice.get("delta") or {}
    if not isinstance(delta, dict):
        raise _odd(chunk)
    text = choice.get("text") or delta.get("content") or ""
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    ids = choice.get("token_ids")
    if not isinstance(text, str) or not (ids is None or (isinstance(ids, list) and all(map(_is_count, ids)))):
        raise _odd(chunk)
    record.text += text
    if ids is not None:
        if record.token_ids is None:
            record.token_ids = []
        record.token_ids.extend(ids)
    if choice.get("finish_reason") is not None:
        record.finish_reason = str(choice["finish_reason"])
    return bool(text or thought or ids)


def check_end(record: Record) -> None:
    """Raises StreamError for an answer that the server did not bring to its end."""
    if record.finish_reason in GIVEN_UP:
        raise StreamError(f"finish_reason is {record.finish_reason}: the server gave the answer up")


def count_tokens(record: Record, usage: dict[str, Any] | None, spoke: bool, limit: int | None) -> None:
    """Of prompt and answer, by the server's usage; the answer's ids are counted where it says nothing.

    spoke: text or ids came. limit: the most tokens that the request lets the answer have. Raises StreamError where
    nothing tells, and for counts that cannot be.
    """
    ids = None if record.token_ids is None else len(record.token_ids)
    told = (usage or {}).get("completion_tokens")
    if told is None:
        told = ids
    if told is None:
        lacks = "no usage" if usage is None else "no completion_tokens in the usage"
        raise StreamError(f"{lacks} in the stream, so the answer's tokens cannot be counted")
    said = f"usage: completion_tokens is {str(told)[:80]}, expected"
    if not _is_count(told) or (told == 0 and spoke):
        raise StreamError(f"{said} the answer's tokens")
    if ids is not None and told != ids:
        raise StreamError(f"{said} {ids}, as many as token ids came")
    if limit is not None and told > limit:
        raise StreamError(f"{said} no more than the {limit} that were asked for")
    prompt = (usage or {}).get("prompt_tokens")
    if prompt is not None and not _is_count(prompt):
        raise StreamError(f"usage: prompt_tokens is {str(prompt)[:80]}, expected a whole number")
    record.output_tokens = told
    record.prompt_tokens = prompt or 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST_TOKENS


def _odd(chunk: dict[str, Any]) -> StreamError:
    return StreamError(f"an event is of another shape than the API's: {str(chunk)[:200]}")
