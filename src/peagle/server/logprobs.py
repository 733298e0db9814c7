"""Reported logprobs in the forms that clients know: OpenAI's for chat and plain completions, vLLM's for prompts.

Where the numbers have no JSON form (minus infinity) they are vLLM's floor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.engine.outputs import PositionLogprobs

FLOOR = -9999.0


def shown(token_id: int, entry: Any) -> str:
    """A token as text; without a tokenizer its id."""
    return f"token_id:{token_id}" if entry.decoded_token is None else str(entry.decoded_token)


def likeliest(position: PositionLogprobs, count: int) -> list[tuple[int, Any]]:
    """The `count` likeliest tokens of a position (-1: all that are reported), the likeliest first."""
    found = [pair for pair in position.items() if count == -1 or pair[1].rank <= count]
    return sorted(found, key=lambda pair: pair[1].rank)


def finite(logprob: float) -> float:
    return max(logprob, FLOOR)


def chat_logprobs(positions: Sequence[PositionLogprobs], count: int) -> dict[str, Any]:
    """A chat choice's logprobs: every token with its `count` likeliest alternatives."""

    def entry(token_id: int, found: Any) -> dict[str, Any]:
        token = shown(token_id, found)
        raw = token.encode("utf-8", "replace") if found.partial_bytes is None else found.partial_bytes
        return {"token": token, "logprob": finite(found.logprob), "bytes": list(raw)}

    content = [
        entry(*next(iter(position.items()))) | {"top_logprobs": [entry(*pair) for pair in likeliest(position, count)]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def text_logprobs(
    positions: Sequence[PositionLogprobs | None], count: int, offset: int, first: str | None = None
) -> dict[str, Any]:
    """A plain completion's logprobs.

    offset: where in the choice's text the first token begins. first: the text of a prompt's first token, whose position
    is None, because nothing precedes it.
    """
    report: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for position in positions:
        if position is None:
            token, logprob, top = first or "", None, None
        else:
            token_id, found = next(iter(position.items()))
            token, logprob = shown(token_id, found), finite(found.logprob)
            top = {shown(*pair): finite(pair[1].logprob) for pair in [(token_id, found), *likeliest(position, count)]}
        report["tokens"].append(token)
        report["token_logprobs"].append(logprob)
        report["top_logprobs"].append(top)
        report["text_offset"].append(offset)
        offset += len(token)
    return report


def prompt_logprobs(
    positions: Sequence[PositionLogprobs | None], count: int
) -> list[Mapping[str, dict[str, Any]] | None]:
    """A prompt's logprobs in vLLM's form: None for the first token, then token id (JSON knows only strings as keys) ->
    its entry, the prompt's own token first."""
    listed: list[Mapping[str, dict[str, Any]] | None] = []
    for position in positions:
        if position is None:
            listed.append(None)
            continue
        own = next(iter(position.items()))
        listed.append(
            {
                str(token_id): {
                    "logprob": finite(entry.logprob),
                    "rank": entry.rank,
                    "decoded_token": entry.decoded_token,
                }
                for token_id, entry in [own, *likeliest(position, count)]
            }
        )
    return listed
