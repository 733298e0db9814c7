"""One arm as a line of the results: what it was, its numbers, and how its answers compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from peagle.bench.answer_check import answers_of, check_answers, check_phrase
from peagle.bench.arms import Arm
from peagle.bench.records import Run
from peagle.bench.results_file import ResultsFile
from peagle.bench.serving_metrics import request_lists, serving_metrics
from peagle.target.model import Target

NOT_COMPARED = "answers were not compared with plain decoding's"


def arm_content(arm: Arm, num_prompts: int, run: Run, detailed: bool) -> dict[str, Any]:
    """An arm as JSON: what it is, `vllm bench serve`'s fields, and what that has no field for. model_id and
    tokenizer_id are the backend's to tell."""
    return {
        **arm.to_dict(),
        "date": datetime.now(UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": arm.setup.engine,
        "label": arm.setup.label,
        "model_id": None,
        "tokenizer_id": None,
        "num_prompts": num_prompts,
        "request_rate": "inf",
        "burstiness": 1.0,  # what vLLM's writes where requests do not arrive at random times
        "max_concurrency": arm.concurrency,
        **serving_metrics(run),
        "num_skipped": run.num_skipped,
        "failures": run.failures,
        "spec": None if run.spec is None else asdict(run.spec),
        "prefix_cache": {"queries": run.cache_queries, "hits": run.cache_hits},
        **request_lists(run, detailed),
    }


def check_line(line: dict[str, Any], arm: Arm, run: Run, results: ResultsFile, target: Target | None = None) -> None:
    """Compare an arm's answers with plain decoding's in the same engine.

    A plain arm that answers more than those before it, or as many at a lower concurrency, keeps its answers, for others
    to be compared with, and the first such arm is compared with another engine's. Where a setup with drafts has nothing
    to be compared with, a note says so. target: the loaded model, for logit gaps.
    """
    stored = [
        other
        for key, other in results.arms.items()
        if key != arm.key and other.get("answers") and other["workload"] == arm.workload  # an arm may be measured again
    ]
    own = [other for other in stored if other["engine"] == arm.setup.engine]
    answers = answers_of(run)
    covering = [other for other in own if len(other["answers"]) >= len(answers)]
    if own:
        # the fewest users round as one user does; where their arms asked less, the one that asked most
        reference = min(covering, key=_users) if covering else max(own, key=lambda other: len(other["answers"]))
        line["check"] = {"with": reference["concurrency"], **check_answers(reference["answers"], run, target)}
    if arm.setup.method != "none" and answers and not line.get("check", {}).get("num_answers"):
        why = "none of them is of the same prompts and kind" if own else "this engine has none of this workload yet"
        line["notes"].append(f"C={arm.concurrency}: {NOT_COMPARED}: {why}")
    if arm.setup.method == "none" and answers and not any(_users(other) <= arm.concurrency for other in covering):
        line["answers"] = [list(answer) for answer in answers]
        other = min((one for one in stored if one["engine"] != arm.setup.engine), key=_users, default=None)
        if other is not None and not own:
            line["check_engines"] = {"with": other["engine"], **check_answers(other["answers"], run)}


def _users(line: Mapping[str, Any]) -> int:
    return int(line["concurrency"])


def arm_line(line: Mapping[str, Any]) -> str:
    """What came out of an arm, for the terminal."""
    parts = [f"{line['output_throughput']:.1f} tokens/s"]
    if line.get("median_ttft_ms") is not None:
        parts.append(f"TTFT {line['median_ttft_ms']:.0f} ms")
    if line.get("median_tpot_ms") is not None:
        parts.append(f"TPOT {line['median_tpot_ms']:.1f} ms")
    if line.get("spec_decode_acceptance_length") is not None:
        parts.append(f"acceptance length {line['spec_decode_acceptance_length']:.2f}")
    if line.get("check"):
        parts.append(check_phrase(line["check"]))
    if any(NOT_COMPARED in note for note in line["notes"]):
        parts.append(NOT_COMPARED)
    if line["failed"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in line["failures"].items())
        first = next(error for error in line["errors"] if error)
        parts.append(f"FAILED: {line['failed']} of {line['failed'] + line['completed']} requests ({kinds}); {first}")
    return " · ".join(parts)
