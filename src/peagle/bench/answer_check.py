"""Do greedy answers stay those of plain decoding? Compared token by token, or as text where a server tells no ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peagle.bench.compare import difference
from peagle.bench.records import Run
from peagle.target.model import Target

# conversation, turn, and the answer as token ids or text
Answer = tuple[int, int, list[int] | str]


def answers_of(run: Run) -> list[Answer]:
    """The answers that succeeded."""
    return [(r.conversation, r.turn, r.token_ids if r.token_ids is not None else r.text) for r in run.succeeded]


def check_answers(reference: Sequence[Sequence[Any]], run: Run, target: Target | None = None) -> dict[str, Any]:
    """How many answers are the reference's, and where the first one leaves it.

    With the loaded `target` the first difference gets its logit gap: near 0 two tokens were tied and rounding chose.

    A conversation's turns behind a difference had another prompt, so they are not compared; neither are answers that
    one of the two runs failed to give (`num_missing`). Kinds that cannot be compared (ids with text) count as missing.
    """
    expected = {(int(c), int(t)): answer for c, t, answer in reference}
    compared = equal = missing = 0
    first: dict[str, Any] | None = None
    diverged: set[int] = set()
    for record, (conversation, turn, answer) in zip(run.succeeded, answers_of(run), strict=True):
        if conversation in diverged:
            continue
        plain = expected.get((conversation, turn))
        if plain is None or isinstance(plain, str) != isinstance(answer, str):
            missing += 1
            continue
        compared += 1
        known = target if first is None and record.prompt_ids is not None else None
        found = _difference(conversation, turn, plain, answer, known, record.prompt_ids or ())
        if found is None:
            equal += 1
            continue
        diverged.add(conversation)
        first = first or found
    missing += len(run.records) - len(run.succeeded)
    return {"num_answers": compared, "num_equal": equal, "num_missing": missing, "first": first}


def _difference(
    conversation: int, turn: int, plain: Any, other: Any, target: Target | None, prompt_ids: Sequence[int]
) -> dict[str, Any] | None:
    """index counts tokens or, for texts, characters."""
    text = isinstance(plain, str)
    a, b = ([ord(c) for c in plain], [ord(c) for c in other]) if text else (plain, other)
    found = difference(None if text else target, conversation, turn, prompt_ids, a, b)
    if found is None:
        return None
    unit = "character" if text else "token"
    return {"prompt": conversation, "turn": turn, "index": found.index, "unit": unit, "logit_gap": found.logit_gap}


def check_phrase(check: dict[str, Any] | None) -> str:
    """For tables: `16 of 16 equal`, or where the first difference is."""
    if check is None:
        return ""
    phrase = f"{check['num_equal']} of {check['num_answers']} equal"
    first = check["first"]
    if first is not None:
        turn = f" turn {first['turn'] + 1}" if first["turn"] else ""
        phrase += f"; first at prompt {first['prompt'] + 1}{turn}, {first['unit']} {first['index'] + 1}"
        if first.get("logit_gap") is not None:
            phrase += f" (logit gap {first['logit_gap']:.2g})"
    return phrase
