"""The numbers of one run, under the names that `vllm bench serve` writes them; docs/bench.md defines each."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from peagle.bench.records import Record, Run

PERCENTILES = (50, 90, 99)


def serving_metrics(run: Run) -> dict[str, Any]:
    """Totals, rates and time statistics of a run (times in milliseconds, `duration` in seconds).

    Failed requests count in `failed` alone: their tokens are in no rate and their times in no statistic. A statistic
    without a single value is None, never 0.
    """
    good = run.succeeded
    tokens_in, tokens_out = sum(r.prompt_tokens for r in good), sum(r.output_tokens for r in good)
    seconds = run.duration
    tpots = [tpot for r in good if (tpot := r.tpot) is not None]
    metrics: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(run.records) - len(good),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": _rate(len(good), seconds),
        "request_goodput": None,  # of requests within goals for their times; there are none here
        "output_throughput": _rate(tokens_out, seconds),
        "total_token_throughput": _rate(tokens_in + tokens_out, seconds),
        "max_output_tokens_per_s": most_in_a_second(good),
        "max_concurrent_requests": most_in_flight(good),
        # ours: how many requests were in flight on average, and what one user sees
        "mean_concurrency": _rate(sum(r.latency for r in good), seconds),
        "per_user_throughput": 1.0 / float(np.median(tpots)) if tpots and np.median(tpots) > 0 else None,
    }
    metrics |= _statistics("ttft", [r.ttft for r in good])
    metrics |= _statistics("tpot", tpots)
    metrics |= _statistics("itl", [itl for r in good for itl in r.itls])
    metrics |= _statistics("e2el", [r.latency for r in good])
    spec = run.spec
    if spec is not None and spec.num_draft_tokens:
        metrics |= {
            "spec_decode_acceptance_rate": 100.0 * spec.num_accepted_tokens / spec.num_draft_tokens,
            "spec_decode_acceptance_length": spec.acceptance_length,
            "spec_decode_num_drafts": spec.num_drafts,
            "spec_decode_draft_tokens": spec.num_draft_tokens,
            "spec_decode_accepted_tokens": spec.num_accepted_tokens,
            "spec_decode_per_position_acceptance_rates": spec.joint_rates,
        }
    return metrics


def request_lists(run: Run, detailed: bool) -> dict[str, list[Any]]:
    """Values a request, in the workload's order, failed ones included (`errors` is empty for a success).

    detailed adds what takes much room: the gaps between tokens, texts and token ids.
    """
    records = run.records
    lists: dict[str, list[Any]] = {
        "input_lens": [r.prompt_tokens for r in records],
        "output_lens": [r.output_tokens if r.failure is None else 0 for r in records],
        "ttfts": [r.ttft for r in records],
        "latencies": [r.latency for r in records],
        "start_times": [r.start for r in records],
        "errors": [f"{r.failure}: {r.error}" if r.failure is not None else "" for r in records],
    }
    if detailed:
        lists["itls"] = [r.itls for r in records]
        lists["generated_texts"] = [r.text for r in records]
        lists["token_ids"] = [r.token_ids for r in records]
    return lists


def most_in_flight(records: Sequence[Record]) -> int:
    """vLLM's `max_concurrent_requests`: how many requests were in flight at some time of a second, in the second of the
    most, by whole seconds from the first request's start. Short requests that follow each other in one second all
    count, so it may be above the concurrency."""
    seconds: Counter[int] = Counter()
    first = min((record.start for record in records), default=0.0)
    for record in records:
        begin = record.start - first
        seconds.update(range(int(begin), int(begin + record.latency) + 1))
    return max(seconds.values(), default=0)


def most_in_a_second(records: Sequence[Record]) -> float | None:
    """Output tokens that arrived in the fullest second, by whole seconds from the first request's start. Several tokens
    may come together, so an answer's are spread evenly over its arrivals. None without an answer."""
    if not records:
        return None
    first = min(record.start for record in records)
    seconds: dict[int, float] = defaultdict(float)
    for record in records:
        arrivals = record.start - first + record.ttft + np.cumsum([0.0, *record.itls])
        for at in arrivals:
            seconds[int(at)] += record.output_tokens / len(arrivals)
    return float(max(seconds.values()))


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    if not seconds:
        keys = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES)]
        return {f"{key}_{name}_ms": None for key in keys}
    values = 1000.0 * np.asarray(seconds)
    found: dict[str, float | None] = {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
    }
    return found | {f"p{p}_{name}_ms": float(np.percentile(values, p)) for p in PERCENTILES}
