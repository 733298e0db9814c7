"""Attention of a decoding step over a ragged paged cache: configurations of our kernel beside other libraries.

    python benchmarks/decode_attention.py [--models llama-8b] [--shapes 64x8,8x8] [--seconds 70] [--json out.json]
    python benchmarks/decode_attention.py --chosen     # only the configuration that the engine would take

Needs a GPU; FlashAttention 3 and FlashInfer are left out where vLLM and flashinfer are not installed. A shape is
REQUESTS x ROWS a request, contexts are drawn from 500..1100. Each form is first compared with the PyTorch form in
float32, on fresh queries and over memory full of NaN, then timed as a replayed CUDA graph over as many layers' caches
as keep them out of L2. The floor is reading keys, values and queries and writing the outputs once at the bandwidth
measured in the same run. The configurations to use go into `kernels/attention_table.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from decode_attention_case import (
    MODELS,
    Case,
    Form,
    check,
    chosen,
    configured,
    general,
    make_case,
    timed,
)
from decode_attention_peers import PEERS
from engine_step import bandwidth

from peagle.bench.json_file import check_writable, write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.kernels.attention_table import DecodeConfig, tile_rows

# REQUESTSxROWS, verification of K = 7, 3 and 0 drafts; 14 rows are P-EAGLE's draft batch for K = 7
SHAPES = {
    "llama-8b": "64x8,64x14,8x8,1x8,64x4,64x1,8x14,1x14,1x4,1x1,8x4,8x1,16x8,32x8,16x14",
    "smollm2": "64x8,8x8,1x8",
}
COMPILERS, MOST_SHOWN = 14, 10
OTHERS = {"general", *PEERS}  # beside the configurations

# by rows of a tile: (block_n, num_warps, num_stages, keys_first)
FORMS: dict[int, list[tuple[int, int, int, bool]]] = {
    16: [(32, 2, 3, False), (32, 2, 4, False), (32, 4, 3, False), (64, 2, 3, False), (64, 4, 2, False),
         (64, 4, 3, False), (64, 4, 2, True), (64, 4, 3, True), (128, 4, 2, False)],
    32: [(32, 2, 3, False), (32, 2, 4, False), (32, 4, 3, False), (64, 2, 3, False), (64, 4, 2, False),
         (64, 4, 3, False), (64, 4, 2, True), (64, 4, 3, True), (128, 8, 2, False)],
    64: [(32, 4, 3, False), (32, 4, 4, False), (64, 4, 2, False), (64, 4, 3, False), (64, 4, 4, False),
         (64, 8, 3, False), (128, 8, 2, False)],
}  # fmt: skip


def candidates(requests: int, rows: int, heads: int, kv_heads: int) -> list[DecodeConfig]:
    programs = requests * kv_heads
    splits = (4, 8, 16) if programs < 16 else (2, 4, 8) if programs < 128 else (1, 2, 4) if programs < 256 else (1, 2)
    forms = FORMS[tile_rows(rows, heads // kv_heads)]
    found = [DecodeConfig(n, warps, stages, s, keys) for n, warps, stages, keys in forms for s in splits]
    return found + [replace(x, early_join=True) for x in found if x.num_splits == splits[1]]


def name(config: DecodeConfig) -> str:
    keys, early = "k" if config.keys_first else "", "e" if config.early_join else ""
    return f"{config.block_n}{keys}/{config.num_warps}/{config.num_stages}/{config.num_splits}{early}"


def compile_one(job: tuple[str, int, int, DecodeConfig | None]) -> None:
    """In another process: run once, so that the compiled kernel is in Triton's cache on the disk."""
    model, requests, rows, config = job
    try:
        case = make_case(model, requests, rows)
        form = general(case) if config is None else configured(case, config)
        form(case.queries(), *case.caches[0])
        torch.cuda.synchronize()
    except Exception:  # it fails again when it is its turn, and is reported then
        return


def to_time(case: Case, only_chosen: bool) -> list[DecodeConfig]:
    if not only_chosen:
        return candidates(len(case.contexts), case.rows, *case.heads[:2])
    config = chosen(case)
    return [] if config is None else [config]


def compile_all(shapes: list[tuple[str, int, int]]) -> None:
    jobs: dict[Any, tuple[str, int, int, DecodeConfig | None]] = {}
    for model, requests, rows in shapes:
        heads, kv_heads, _ = MODELS[model]
        jobs[model, requests, rows] = (model, requests, rows, None)
        for config in candidates(requests, rows, heads, kv_heads):
            # how many splits there are changes the kernel that joins them, not the other
            alike = replace(config, num_splits=min(2, config.num_splits))
            jobs[model, tile_rows(rows, heads // kv_heads), alike] = (model, 1, rows, alike)
            jobs[model, "join", config.num_splits, config.early_join] = (model, 1, rows, config)
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs.values(), chunksize=1))


def measure(case: Case, config: DecodeConfig | None, make: Callable[[], Form | None]) -> dict[str, Any]:
    """error, us (all rounds); or why there is no time."""
    found: dict[str, Any] = {"config": None if config is None else asdict(config)}
    try:
        if (form := make()) is None:
            return found | {"failed": "not installed"}
        found["error"] = check(case, form)
        if not found["error"] < 1e-2:
            return found | {"failed": f"relative error {found['error']:.2g}"}
        return found | {"us": timed(case, form)}
    except Exception as error:  # not for this card or shape: say so and go on
        return found | {"failed": f"{error.__class__.__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def line(result: dict[str, Any], median: dict[str, float]) -> list[str]:
    """A row of the table: the general kernel and the best configuration of a shape."""
    floor, nan = result["floor_us"], float("nan")
    best = min(median.keys() - OTHERS, key=lambda key: median[key])
    old, new, us = median.get("general", nan), median[best], result["forms"][best]["us"]
    numbers = (f"{floor:.1f}", f"{old:.1f}", f"{old / floor:.2f}", f"{new:.1f}", f"{min(us):.1f}..{max(us):.1f}",
               f"{result['bytes'] / new / 1e3:.0f}", f"{new / floor:.2f}")  # fmt: skip
    shape = f"{result['requests']}x{result['rows']}"
    return [result["model"], shape, *numbers, best, *(f"{median.get(peer, nan):.1f}" for peer in PEERS)]


def best_table(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The best configuration of each head_dim, tile and number of programs, by the sum of its ratios to the floor."""
    groups: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
    for result in results:
        heads, kv_heads, dim = MODELS[result["model"]]
        key = (dim, tile_rows(result["rows"], heads // kv_heads), result["requests"] * kv_heads)
        groups.setdefault(key, []).append(result)
    lines = []
    for (dim, tile, programs), members in sorted(groups.items()):
        ratios = [
            {key: statistics.median(x["us"]) / result["floor_us"] for key, x in result["forms"].items() if "us" in x}
            for result in members
        ]
        common = [key for key in ratios[0] if key not in OTHERS - {"general"} and all(key in ratio for ratio in ratios)]
        if common:
            best = min(common, key=lambda key: sum(ratio[key] for ratio in ratios))
            config = members[0]["forms"][best]["config"]
            lines.append({"head_dim": dim, "tile_rows": tile, "programs": programs, "config": config})
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-8b,smollm2")
    parser.add_argument("--shapes", default=None, help="REQUESTSxROWS, by commas; default: some of each model's.")
    parser.add_argument("--chosen", action="store_true", help="Of our configurations only the one the engine takes.")
    parser.add_argument("--seconds", type=float, default=70, help="Start no further configuration after this.")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.json is not None:
        check_writable(args.json)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/decode_attention.py needs a CUDA device")
    begin = time.perf_counter()
    shapes = []
    for model in args.models.split(","):
        for shape in (args.shapes or SHAPES[model]).split(","):
            requests, rows = map(int, shape.split("x"))
            shapes.append((model, requests, rows))
    if not args.chosen:
        compile_all(shapes)
    compiled = time.perf_counter() - begin
    device = torch.device("cuda")
    facts, speed = machine_facts(device, torch.bfloat16), bandwidth(device)
    print(f"{machine_line(facts)}\nread bandwidth {speed / 1e9:.0f} GB/s; compiled in {compiled:.0f} s")
    results, skipped = [], 0
    table = [["model", "shape", "floor us", "general", "ratio", "best", "min..max", "GB/s", "ratio", "configuration",
              *PEERS]]  # fmt: skip
    for model, requests, rows in shapes:
        case = make_case(model, requests, rows)
        forms = {"general": measure(case, None, partial(general, case))}
        for peer, make in PEERS.items():
            forms[peer] = measure(case, None, partial(make, case))
        for config in to_time(case, args.chosen):
            if not args.chosen and time.perf_counter() - begin > args.seconds:
                skipped += 1
                continue
            forms[name(config)] = measure(case, config, partial(configured, case, config))
        results.append({"model": model, "requests": requests, "rows": rows, "contexts": case.contexts,
                        "bytes": case.num_bytes, "floor_us": case.num_bytes / speed * 1e6, "forms": forms})  # fmt: skip
        del case
        median = {key: statistics.median(x["us"]) for key, x in forms.items() if "us" in x}
        fastest = sorted(median.items(), key=lambda item: item[1])[:MOST_SHOWN]
        print(f"{model} {requests}x{rows}: " + ", ".join(f"{key} {us:.1f}" for key, us in fastest))
        for key, x in forms.items():
            if "failed" in x:
                print(f"  {key} left out: {x['failed'][:120]}")
        if median.keys() - OTHERS:
            table.append(line(results[-1], median))
    print("\nus a layer; a configuration is block_n (k: keys first) / warps / stages / splits (e: early join)")
    print(align(table, left=2))
    lines = best_table(results)
    for x in lines:
        config = None if x["config"] is None else DecodeConfig(**x["config"])
        print(f"({x['head_dim']}, {x['tile_rows']}): ({x['programs']}, {config}),")
    print(f"{time.perf_counter() - begin:.0f} s, {skipped} configurations not timed")
    if args.json is not None:
        found = {"machine": facts, "bytes_per_second": speed, "results": results, "table": lines, "not_timed": skipped}
        write_json(args.json, found)


if __name__ == "__main__":
    main()
