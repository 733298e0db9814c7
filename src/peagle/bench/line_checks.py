"""Are the fields of a results line there, and what they should be? A damaged file is refused by line and field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from peagle.bench.arms import METHOD_NAMES
from peagle.errors import InputError

# settings to which a later run may add: each is by workload, method, engine, endpoint or package
GROWING = ("workloads", "heads", "target_weights", "engines", "prefix_caching", "threads", "endpoints", "versions")
# no count and no time of a measurement is as large; what is cannot be drawn, nor all of it turned into floats
MOST = 2**63


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -MOST < value < MOST  # NaN is neither


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(map(_number, value))


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _errors(value: Any) -> bool:
    return isinstance(value, list) and all(one is None or isinstance(one, str) for one in value)


def _answers(value: Any) -> bool:
    def fits(answer: Any) -> bool:
        if not isinstance(answer, list) or len(answer) != 3:
            return False
        *place, tokens = answer
        return all(map(_whole, place)) and (isinstance(tokens, str) or _numbers(tokens))

    return isinstance(value, list) and all(map(fits, value))


def _arguments(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(one, dict) or _texts(one) for one in value.values())


def _object_or_null(value: Any) -> bool:
    return value is None or isinstance(value, dict)


def _object_of(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


# what a value has to be, in words
Kind = tuple[str, Callable[[Any], bool]]
WHOLE: Kind = "a whole number", _whole
NUMBER: Kind = "a number", _number
NUMBERS: Kind = "a list of numbers", _numbers
TEXT: Kind = "a text", lambda value: isinstance(value, str)
TEXTS: Kind = "a list of texts", _texts
OBJECT: Kind = "an object", lambda value: isinstance(value, dict)
METHOD: Kind = f"one of {', '.join(METHOD_NAMES)}", lambda value: value in list(METHOD_NAMES)

NEEDED: dict[str, dict[str, Kind]] = {
    "head": {"settings": OBJECT},
    "settings": {},
    "run": {
        "date": TEXT,
        "command": TEXT,
        "machine": OBJECT,
        "head_paths": OBJECT,
        "workload_sources": OBJECT,
    },
    "arm": {
        "key": TEXT,
        "engine": TEXT,
        "method": METHOD,
        "k": WHOLE,
        "workload": TEXT,
        "concurrency": WHOLE,
        "label": TEXT,
        "output_throughput": NUMBER,
        "completed": WHOLE,
        "failed": WHOLE,
    },
    "result": {"duration": NUMBER, "completed": WHOLE, "total_output_tokens": WHOLE, "output_throughput": NUMBER},
    "failed_start": {"setup": TEXT, "error": TEXT},
    "server_commands": {"commands": ("an object of texts", _object_of(lambda value: isinstance(value, str)))},
    "spec": {
        **dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), WHOLE),
        **dict.fromkeys(("accepted_per_pos", "drafts_per_pos"), NUMBERS),
    },
    "check": {"num_answers": WHOLE, "num_equal": WHOLE, "first": ("an object or null", _object_or_null)},
    "check_engines": {"with": TEXT},
    "first": {"prompt": WHOLE, "turn": WHOLE, "index": WHOLE, "unit": TEXT},
}
_METRICS: dict[str, Kind] = {
    **dict.fromkeys(("num_prompts", "num_skipped", "total_input_tokens", "total_output_tokens"), WHOLE),
    **dict.fromkeys(("duration", "per_user_throughput", "mean_concurrency"), NUMBER),
    **dict.fromkeys((f"{p}_{name}_ms" for p in ("median", "p99") for name in ("ttft", "tpot")), NUMBER),
    "spec_decode_acceptance_length": NUMBER,
    "spec_decode_per_position_acceptance_rates": NUMBERS,
    **dict.fromkeys(("input_lens", "output_lens"), NUMBERS),
    "errors": ("a list of texts", _errors),
}
_OF_RUNS: dict[str, Kind] = {
    **dict.fromkeys(GROWING, OBJECT),
    "engines": ("an object of objects or lists of texts", _arguments),
    "endpoints": ("an object of objects", _object_of(OBJECT[1])),
}
# may be missing, or null if they are not of GROWING
OPTIONAL: dict[str, dict[str, Kind]] = {
    "result": {**_METRICS, "failed": WHOLE},
    "settings": _OF_RUNS,
    "run": _OF_RUNS,
    "failed_start": {"arms": TEXTS},
    "spec": {"reached_per_pos": NUMBERS},
    "first": {"logit_gap": NUMBER},
    "arm": {
        **_METRICS,
        "notes": TEXTS,
        **dict.fromkeys(("facts", "synthetic"), OBJECT),
        "failures": ("an object of whole numbers", _object_of(_whole)),
        "answers": ("a list of [conversation, turn, answer]", _answers),
        "command": TEXT,
    },
}


def check_fields(where: str, kind: str, content: Mapping[str, Any]) -> None:
    """Raises InputError for the first field that is missing or wrong. where: file and line."""
    for name, (words, fits) in NEEDED[kind].items():
        if name not in content:
            raise InputError(f"{where}: {kind}: {name}: missing, expected {words}")
        _check(where, kind, name, content[name], words, fits)
    for name, (words, fits) in OPTIONAL.get(kind, {}).items():
        if content.get(name) is not None or (name in GROWING and name in content):
            _check(where, kind, name, content[name], words, fits)
    if kind == "arm":
        _check_parts(where, content)


def _check_parts(where: str, arm: Mapping[str, Any]) -> None:
    """What lies a level deeper, where it is there."""
    for name, kind in (("spec", "spec"), ("check", "check"), ("check_engines", "check")):
        part = arm.get(name)
        if part is None:
            continue
        _check(where, "arm", name, part, *OBJECT)
        check_fields(where, kind, part)
        if kind == "check" and part["first"] is not None:
            check_fields(where, "first", part["first"])
    if arm.get("check_engines") is not None:
        check_fields(where, "check_engines", arm["check_engines"])


def _check(where: str, kind: str, name: str, value: Any, words: str, fits: Callable[[Any], bool]) -> None:
    if not fits(value):
        raise InputError(f"{where}: {kind}: {name}: got {str(value)[:80]!r}, expected {words}")
