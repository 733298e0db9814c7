"""Checks what `vllm bench serve --save-result --save-detailed` wrote against the server's own counters.

python check_vllm_bench.py RESULT.json METRICS.txt; METRICS.txt is a scrape after the run, of a server that served
nothing else. Exits with 1 and the reasons when something is wrong. Needs the standard library only.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any


def counters(scrape: str) -> dict[str, float]:
    """Samples without their labels, those of one name added up."""
    found: dict[str, float] = {}
    for name, value in re.findall(r"^([a-z_:]+)(?:\{[^}]*\})? (\S+)$", scrape, flags=re.MULTILINE):
        found[name] = found.get(name, 0) + float(value)
    return found


def problems(result: dict[str, Any], scraped: dict[str, float]) -> list[str]:
    """What does not fit together; an empty list when everything does."""
    found = []
    expected = {"completed": result["num_prompts"], "failed": 0, "total_output_tokens": sum(result["output_lens"])}
    for name, value in expected.items():
        if result[name] != value:
            found.append(f"{name}: {result[name]}, expected {value}")
    # the server may have counted more: some versions of vLLM try it with a request that they do not report
    totals = {
        "total_output_tokens": "vllm:generation_tokens_total",
        "spec_decode_num_drafts": "vllm:spec_decode_num_drafts_total",
        "spec_decode_draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
        "spec_decode_accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    }
    for name, counter in totals.items():
        if not 0 < result[name] <= scraped[counter]:
            found.append(f"{name}: {result[name]}, expected more than 0 and at most the server's {scraped[counter]:g}")
    length = 1 + result["spec_decode_accepted_tokens"] / result["spec_decode_num_drafts"]
    if abs(result["spec_decode_acceptance_length"] - length) > 1e-6:
        found.append(f"spec_decode_acceptance_length: {result['spec_decode_acceptance_length']}, expected {length}")
    if any(result["errors"]):
        found.append(f"errors: {[error for error in result['errors'] if error][:3]}")
    found += [
        f"{name}: {result[name]}, expected more than 0"
        for name in ("output_throughput", "mean_ttft_ms", "mean_itl_ms")
        if not result[name] > 0
    ]
    return found


def main() -> int:
    result, scrape = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]).read_text()
    found = problems(result, counters(scrape))
    for problem in found:
        print(problem, file=sys.stderr)
    if not found:
        tokens, length = result["total_output_tokens"], result["spec_decode_acceptance_length"]
        print(f"as it should be: {result['completed']} requests, {tokens} tokens, acceptance length {length:.2f}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
