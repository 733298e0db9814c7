"""Tokens/s of this project's server and of stock vLLM over concurrency, on one prompt file: one table, one JSON.

usage: python benchmarks/serving.py TARGET --prompts FILE[:N] [--p-eagle HEAD] [--eagle3 HEAD] [--k 3,7]
           [--concurrency 1,4,16] [--engines peagle-serve,vllm] [--vllm-args='--enforce-eager'] [--json PATH]

Both servers are started and stopped by this script, one after the other, with their prefix caches off; vLLM is the one
installed here or on PATH. The same prompts go to both as token ids, in the same order. `peagle bench` does the same
and more (docs/bench.md); what is measured, and how, is one code.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from peagle.bench.arms import METHODS, parse_names, parse_numbers, plan_setups
from peagle.bench.backends import RunSettings
from peagle.bench.bench_run import Plan, check_plan, run_facts, run_plan
from peagle.bench.json_file import check_writable, write_json
from peagle.bench.report_tables import number
from peagle.bench.summary import Point, points_of
from peagle.bench.sweep import SweepOptions
from peagle.bench.tables import align
from peagle.bench.terminal_screen import TerminalScreen
from peagle.bench.workloads import load_workload
from peagle.cli.bench import quiet_transformers
from peagle.errors import InputError
from peagle.target.text import read_target_text


def table(points: list[Point]) -> str:
    rows = [["engine", "method", "K", "C", "tokens/s", "TTFT ms", "TPOT ms", "AL", "failed", "equal to plain"]]
    for p in points:
        length, check = p.acceptance_length, p.arms[0].get("check")
        rows.append(
            [
                p.setup.engine,
                p.setup.method,
                str(p.setup.k) if p.setup.k else "",
                str(p.concurrency),
                number(p.rate),
                number(p.median("median_ttft_ms"), 0),
                number(p.median("median_tpot_ms")),
                "" if length is None else f"{length:.2f}",
                str(p.failed),
                f"{check['num_equal']} of {check['num_answers']}" if check else "",
            ]
        )
    return align(rows, left=2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--p-eagle", dest="p_eagle")
    parser.add_argument("--eagle3")
    parser.add_argument("--k", default="3,7")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--engines", default="peagle-serve,vllm")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--serve-args", default="", help="further flags of peagle serve, quoted")
    parser.add_argument("--vllm-args", default="", help="further flags of vllm serve, quoted")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All arms' results, with the machine and the command."""
    heads = {"eagle3": args.eagle3, "p-eagle": args.p_eagle}
    heads = {method: head for method, head in heads.items() if head is not None}
    engines = parse_names(args.engines, "--engines", ("peagle-serve", "vllm"))
    methods = [method for method in METHODS if method == "none" or method in heads]
    users = parse_numbers(args.concurrency, "--concurrency")
    quiet_transformers(None)
    text = read_target_text(args.target)
    plan = Plan(
        setups=plan_setups(engines, methods, parse_numbers(args.k, "--k")),
        workloads=[load_workload(args.prompts, None, text, 0)],
        concurrencies=users,
        repeats=args.repeats,
        interleave=False,
        settings=RunSettings(
            target=args.target,
            heads=heads,
            max_tokens=args.max_tokens,
            dtype=args.dtype,
            max_num_seqs=max(64, *users),
            max_model_len=args.max_model_len,
            serve_args=shlex.split(args.serve_args),
            vllm_args=shlex.split(args.vllm_args),
        ),
        options=SweepOptions(args.max_tokens),
        given=[],
        output=folder,
        command=shlex.join(["python", *sys.argv]),
    )
    for note in check_plan(plan, text):
        print(f"note: {note}", file=sys.stderr)
    results = run_plan(plan, text, TerminalScreen())
    print(table(points_of(results.arms.values())))
    arms = [{key: value for key, value in arm.items() if key != "answers"} for arm in results.arms.values()]
    return {**run_facts(plan), "settings": results.settings, "failed_starts": results.failed_starts, "arms": arms}


def main() -> None:
    args = arguments()
    try:
        if args.json is not None:
            check_writable(args.json)
        with tempfile.TemporaryDirectory() as folder:
            found = measure(args, Path(folder))
        if args.json is not None:
            write_json(args.json, found)
    except InputError as error:
        sys.exit(f"serving.py: error: {error}")
    if found["failed_starts"] or any(arm["failed"] for arm in found["arms"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
