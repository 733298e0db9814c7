"""Results of `vllm bench serve` as arms of ours, so that a server measured elsewhere stands in the same report.

Its JSON says neither method nor K nor workload, unless it was run with `--metadata method=p-eagle k=7
workload=mt_bench`; what it does not say is given beside the file's name. Its arms stand apart from ours (its client
sends other requests) unless they are told to be of the same engine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peagle.bench.arms import METHODS, Arm, Setup
from peagle.bench.line_checks import check_fields
from peagle.errors import InputError

CLOSED = "arms here are closed loops (max_concurrency alone), and tokens/s at a rate of requests do not compare"
OPTIONS = ("engine", "method", "k", "workload", "concurrency")
NEEDED = ("duration", "completed", "total_output_tokens", "output_throughput")


def read_vllm_results(specs: Sequence[str]) -> list[dict[str, Any]]:
    """`FILE[:engine=E][:method=M][:k=K][:workload=W][:concurrency=C]`, any number -> arm lines.

    A file holds one result, or several one behind another (`--append-result`). Results of the same arm become its
    repeats. Raises InputError for what is no such file, for an arm whose method or workload nobody told, and for a
    result that is there twice: it would pass for a repeat without any spread.
    """
    arms: list[dict[str, Any]] = []
    seen: dict[str, str] = {}
    for spec in specs:
        location, *rest = re.split(rf":(?=(?:{'|'.join(OPTIONS)})=)", spec)
        given = dict(part.split("=", 1) for part in rest)
        path = Path(location)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--add {location}: cannot be read ({error})")
        for result in _results(path, text):
            content = json.dumps(result, sort_keys=True)
            if content in seen:
                raise InputError(f"--add {spec}: holds a result that --add {seen[content]} has, expected each once")
            seen[content] = spec
            arm = _arm(location, result, given)
            repeat = sum(_same(arm, other) for other in arms)
            arms.append(arm | {"repeat": repeat})
    return arms


def _results(path: Path, text: str) -> list[dict[str, Any]]:
    decoder, found, place = json.JSONDecoder(), [], 0
    text = text.strip()
    while place < len(text):
        try:
            content, place = decoder.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise InputError(f"--add {path}: not JSON ({error.msg} at line {error.lineno})")
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits, brackets as deep
            raise InputError(f"--add {path}: not JSON ({error})")
        while place < len(text) and text[place].isspace():
            place += 1
        if not isinstance(content, dict) or any(name not in content for name in NEEDED):
            raise InputError(f"--add {path}: is no result of `vllm bench serve`, expected {', '.join(NEEDED)} in it")
        content = _told(content)
        check_fields(f"--add {path}", "result", content)
        found.append(content)
    if not found:
        raise InputError(f"--add {path}: is empty")
    return found


def _told(result: Mapping[str, Any]) -> dict[str, Any]:
    """Without the NaN that vLLM writes where it has nothing to say; what every result needs stays, to be refused."""
    return {
        name: value
        for name, value in result.items()
        if name in NEEDED or not (isinstance(value, float) and not math.isfinite(value))
    }


def _check_closed_loop(location: str, result: Mapping[str, Any]) -> None:
    """Where requests come at a rate, tokens/s tell the rate and not the server."""
    rate, ramp = result.get("request_rate"), result.get("ramp_up_strategy")
    if ramp is not None:
        raise InputError(f"--add {location}: ramp_up_strategy: got {ramp!r}, expected a run without it: {CLOSED}")
    if rate is not None and str(rate) != "inf":
        raise InputError(f"--add {location}: request_rate: got {rate!r}, expected inf: {CLOSED}")


def _arm(location: str, result: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    def told(name: str, default: Any = None) -> str:
        value = given.get(name, result.get(name, default))
        if value is None:
            raise InputError(
                f"--add {location}: the file does not say its {name}; add :{name}=VALUE to the file's name, or run "
                f"vllm bench serve with --metadata {name}=VALUE"
            )
        return str(value)

    _check_closed_loop(location, result)
    method = told("method")
    if method not in METHODS:
        raise InputError(f"--add {location}: method={method}: expected one of {', '.join(METHODS)}")
    k = told("k", 0 if method == "none" else None)
    concurrency = told("concurrency", result.get("max_concurrency"))
    for name, value in (("k", k), ("concurrency", concurrency)):
        if not value.isdecimal():
            raise InputError(f"--add {location}: {name}={value}: expected a whole number")
    if method == "none" and int(k):
        raise InputError(f"--add {location}: k={k}: expected 0 or nothing with method=none, which drafts no token")
    arm = Arm(Setup(told("engine", "vllm-bench-serve"), method, int(k)), told("workload"), int(concurrency), 0)
    tpot = result.get("median_tpot_ms")
    failed = _failed(result)
    own = {"per_user_throughput": 1000.0 / tpot if tpot else None, "failed": failed}
    own["num_prompts"] = int(result["completed"]) + failed  # there it is what was wished for, here what was asked
    errors = {"failures": {"not told": failed} if failed else {}, "spec": None, "check": None}
    return {**result, **own, **errors, **arm.to_dict(), "label": arm.setup.label, "imported": location, "notes": []}


def _failed(result: Mapping[str, Any]) -> int:
    """Requests that failed. Older versions do not say so: then by how many were sent (a list has a value for each),
    or else should have been (a data set may have fewer prompts than were wished for)."""
    if result.get("failed") is not None:
        return int(result["failed"])
    completed = int(result["completed"])
    sent = max(len(result.get(name) or ()) for name in ("errors", "input_lens")) or int(result.get("num_prompts") or 0)
    return max(sent - completed, sum(1 for error in result.get("errors") or () if error), 0)


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a[name] == b[name] for name in OPTIONS)
