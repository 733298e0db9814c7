"""Results of `vllm bench serve` as arms of ours, so that a server measured elsewhere stands in the same report.

Its JSON says neither method nor K nor workload, unless it was run with `--metadata method=p-eagle k=7
workload=mt_bench`; what it does not say is given beside the file's name. Its arms stand apart from ours (its client
sends other requests) unless they are told to be of the same engine.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peagle.bench.arms import METHODS, Arm, Setup
from peagle.bench.line_checks import check_fields
from peagle.errors import InputError

OPTIONS = ("engine", "method", "k", "workload", "concurrency")
NEEDED = ("duration", "completed", "total_output_tokens", "output_throughput")


def read_vllm_results(spec: str) -> list[dict[str, Any]]:
    """`FILE[:engine=E][:method=M][:k=K][:workload=W][:concurrency=C]` -> arm lines.

    A file holds one result, or several one behind another (`--append-result`). Results of the same arm become its
    repeats. Raises InputError for what is no such file and for an arm whose method or workload nobody told.
    """
    location, *rest = re.split(rf":(?=(?:{'|'.join(OPTIONS)})=)", spec)
    given = dict(part.split("=", 1) for part in rest)
    path = Path(location)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--add {location}: cannot be read ({error})")
    arms: list[dict[str, Any]] = []
    for result in _results(path, text):
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
        while place < len(text) and text[place].isspace():
            place += 1
        if not isinstance(content, dict) or any(name not in content for name in NEEDED):
            raise InputError(f"--add {path}: is no result of `vllm bench serve`, expected {', '.join(NEEDED)} in it")
        check_fields(f"--add {path}", "result", content)
        found.append(content)
    if not found:
        raise InputError(f"--add {path}: is empty")
    return found


def _arm(location: str, result: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    def told(name: str, default: Any = None) -> str:
        value = given.get(name, result.get(name, default))
        if value is None:
            raise InputError(
                f"--add {location}: the file does not say its {name}; add :{name}=VALUE to the file's name, or run "
                f"vllm bench serve with --metadata {name}=VALUE"
            )
        return str(value)

    method = told("method")
    if method not in METHODS:
        raise InputError(f"--add {location}: method={method}: expected one of {', '.join(METHODS)}")
    k = told("k", 0 if method == "none" else None)
    concurrency = told("concurrency", result.get("max_concurrency"))
    for name, value in (("k", k), ("concurrency", concurrency)):
        if not value.isdecimal():
            raise InputError(f"--add {location}: {name}={value}: expected a whole number")
    arm = Arm(Setup(told("engine", "vllm-bench-serve"), method, int(k)), told("workload"), int(concurrency), 0)
    tpot = result.get("median_tpot_ms")
    own = {"per_user_throughput": 1000.0 / tpot if tpot else None, "failed": _failed(result)}
    # vLLM writes NaN and zeros where it has nothing to say
    kept = {k: v for k, v in result.items() if not (isinstance(v, float) and not math.isfinite(v))}
    errors = {"failures": {"not told": own["failed"]} if own["failed"] else {}, "spec": None, "check": None}
    return {**kept, **own, **errors, **arm.to_dict(), "label": arm.setup.label, "imported": location, "notes": []}


def _failed(result: Mapping[str, Any]) -> int:
    """Requests that failed. Older versions do not say so: then by what is missing, or by what has an error."""
    told, completed = int(result.get("failed") or 0), int(result["completed"])
    missing = int(result.get("num_prompts") or 0) - completed
    return max(told, missing, sum(1 for error in result.get("errors") or () if error))


def _same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return all(a[name] == b[name] for name in OPTIONS)
