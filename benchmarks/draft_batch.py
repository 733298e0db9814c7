"""The draft batch's Triton kernels beside the unfused PyTorch version: time, and kernels launched, in one run.

    python benchmarks/draft_batch.py [--requests 64] [--k 7] [--hidden-size 4096] [--json out.json]

Needs a GPU. Both forms are timed as the engine runs them: eagerly, with their launches, and replayed from a CUDA graph.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path

import torch

from peagle.bench.json_file import write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.kernels.draft_batch import copy_hidden_states, expand_draft_batch
from peagle.kernels.draft_batch_triton import copy_hidden_states_triton, expand_draft_batch_triton

REPEATS, ROUNDS = 200, 9


def timed(function: Callable[[], object]) -> list[float]:
    """Microseconds a call, of ROUNDS rounds."""
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPEATS):
            function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / REPEATS)
    return times


def launches(function: Callable[[], object]) -> int:
    """Device kernels of one call."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(
        event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(("Memcpy", "Memset"))
        for event in profile.events()
    )


def captured(function: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--k", type=int, default=7)
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/draft_batch.py needs a CUDA device")
    device, n, k, block_size = torch.device("cuda"), args.requests, args.k, 16
    g = torch.Generator().manual_seed(0)
    rows = k + 1
    first = torch.randint(0, 2000, (n,), generator=g)
    tables = torch.randperm(n * 128, generator=g).view(n, 128).int()
    batch = (
        torch.randint(0, 100_000, (n * rows,), generator=g).to(device),
        (first[:, None] + torch.arange(rows)).flatten().to(device),
        (torch.arange(n + 1) * rows).int().to(device),
        torch.randint(0, 100_000, (n,), generator=g).to(device),
        torch.randint(0, rows, (n,), generator=g).to(device),
        torch.full((n,), k).to(device),
        torch.ones(n, dtype=torch.bool, device=device),
        tables.to(device),
        block_size,
        k - 1,
        99,
    )
    states = torch.randn(n * rows, args.hidden_size, dtype=torch.bfloat16, device=device)
    mask_state = torch.randn(args.hidden_size, dtype=torch.bfloat16, device=device)
    expanded = expand_draft_batch(*batch)
    rows_of = (states, mask_state, expanded.hidden_rows, expanded.is_masked)
    forms: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "expand": (lambda: expand_draft_batch(*batch), lambda: expand_draft_batch_triton(*batch)),
        "hidden states": (lambda: copy_hidden_states(*rows_of), lambda: copy_hidden_states_triton(*rows_of)),
    }
    facts = machine_facts(device, torch.bfloat16)
    results = []
    for name, pair in forms.items():
        for form, function in zip(("PyTorch", "Triton"), pair, strict=True):
            for _ in range(3):
                function()
            eager, graph = timed(function), timed(captured(function))
            results.append({"part": name, "form": form, "launches": launches(function), "eager": eager, "graph": graph})
    table = [
        ["part", "form", "launches", "us eager (median)", "min..max", "us in a graph", "min..max", "ratio in graph"]
    ]
    for i, r in enumerate(results):
        unfused = statistics.median(results[i - i % 2]["graph"])
        cells = [r["part"], r["form"], str(r["launches"])]
        for times in (r["eager"], r["graph"]):
            cells += [f"{statistics.median(times):.1f}", f"{min(times):.1f}..{max(times):.1f}"]
        table.append([*cells, f"{unfused / statistics.median(r['graph']):.1f}x"])
    print(machine_line(facts))
    print(f"{n} requests, K = {k}: {n * rows} target rows, {n * (rows + k - 1)} drafter rows, hidden size "
          f"{args.hidden_size}\n")  # fmt: skip
    print(align(table, left=2))
    if args.json is not None:
        write_json(args.json, {"machine": facts, "requests": n, "k": k, "results": results})


if __name__ == "__main__":
    main()
