"""Where the time of stock vLLM's step goes: how busy the device is, and what the host launches one by one.

    python benchmarks/vllm_profile.py TARGET --prompts mt_bench.jsonl --users 1,8,64 --json none.json
    python benchmarks/vllm_profile.py TARGET --head HEAD --parallel-drafting -k 7 --prompts mt_bench.jsonl --users 64

Runs in vLLM's environment (nothing of this project is imported), one method a process. The engine is in this process
and `async_scheduling` off, so that a profile holds everything and steps can be counted. For each number of users the
first prompts of the file are answered greedily, OUTPUT_TOKENS each whatever they end with: twice to warm up, twice
timed (tokens/s of the better), once under torch.profiler. Several processes may load at once and wait for their turns:
--wait-for FILE measures when FILE is there.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel")
COPIES = ("Memcpy", "Memset")
WAITS = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize")


def busy_seconds(spans: list[tuple[int, int]]) -> float:
    """Seconds in which at least one of the spans (begin, end; nanoseconds) lasts."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0)
        reached = max(reached, end)
    return total / 1e9


def read_profile(profile: Any, seconds: float, steps: int) -> dict[str, Any]:
    """Of one profiled run: share of its time with the device at work, and a step's device time and host calls."""
    spans: list[tuple[int, int]] = []
    calls: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for event in profile.profiler.kineto_results.events():
        name = event.name()
        if "CUDA" in str(event.device_type()):
            if event.duration_ns():
                spans.append((event.start_ns(), event.start_ns() + event.duration_ns()))
                kernels[name] += event.duration_ns()
            continue
        if not name.startswith(("cuda", "cu")):
            continue
        if "GraphLaunch" in name:
            calls["graphs"] += 1
        elif any(part in name for part in LAUNCHES):
            calls["launches"] += 1
        elif any(part in name for part in COPIES):
            calls["copies"] += 1
        elif any(part in name for part in WAITS):
            calls["waits"] += 1
    busy = busy_seconds(spans)
    return {
        "steps": steps,
        "seconds": seconds,
        "device_share": busy / seconds,
        "device_ms_per_step": 1e3 * busy / steps,
        "step_ms": 1e3 * seconds / steps,
        "per_step": {name: calls[name] / steps for name in ("launches", "graphs", "copies", "waits")},
        "longest_kernels_ms": {name[:120]: ns / 1e6 for name, ns in kernels.most_common(12)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--head")
    parser.add_argument("--parallel-drafting", action="store_true")
    parser.add_argument("-k", type=int, default=7)
    parser.add_argument("--prompts", type=Path, required=True, help="MT-Bench's question.jsonl: first turns are asked")
    parser.add_argument("--users", default="1,8,64")
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--profiled-tokens", type=int, default=48)
    parser.add_argument("--wait-for", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would be compiled first
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import torch

    import vllm

    speculative = {"method": "eagle3", "model": args.head, "num_speculative_tokens": args.k} if args.head else None
    if speculative and args.parallel_drafting:
        speculative |= {"parallel_drafting": True}
    cuda = torch.cuda.is_available()
    llm = vllm.LLM(
        model=args.target, dtype="bfloat16" if cuda else "float32", max_model_len=2048, max_num_seqs=64, seed=0,
        speculative_config=dict(speculative) if speculative else None,  # vLLM adds to it
        async_scheduling=False, enable_prefix_caching=False,
        kv_cache_memory_bytes=3_500_000_000 if cuda else 1_000_000_000, gpu_memory_utilization=0.05,
    )  # fmt: skip
    steps = 0
    plain_step = llm.llm_engine.step

    def step() -> Any:
        nonlocal steps
        steps += 1
        return plain_step()

    llm.llm_engine.step = step
    print(f"ready: vLLM {vllm.__version__}, {args.head or 'no speculation'}", flush=True)
    while args.wait_for is not None and not args.wait_for.exists():
        time.sleep(0.2)
    turns = [json.loads(line)["turns"][0] for line in args.prompts.read_text().splitlines() if line.strip()]
    chats = [[{"role": "user", "content": turn}] for turn in turns]

    def answer(users: int, tokens: int) -> tuple[float, int]:
        """Seconds and steps."""
        nonlocal steps
        steps, began = 0, time.perf_counter()
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        llm.chat(chats[:users], params, use_tqdm=False)
        return time.perf_counter() - began, steps

    rows = []
    for users in (int(text) for text in args.users.split(",")):
        for _ in range(2):
            answer(users, args.output_tokens)
        rate = max(users * args.output_tokens / answer(users, args.output_tokens)[0] for _ in range(2))
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
        with torch.profiler.profile(activities=kinds) as profile:
            seconds, count = answer(users, args.profiled_tokens)
        row = {"users": users, "tokens_per_second": rate} | read_profile(profile, seconds, count)
        rows.append(row)
        each = ", ".join(f"{value:.1f} {name}" for name, value in row["per_step"].items())
        print(
            f"{users} users: {rate:,.0f} tokens/s; profiled: {count} steps of {row['step_ms']:.1f} ms, device at work "
            f"{row['device_share']:.0%}, {row['device_ms_per_step']:.2f} ms a step; a step has {each}",
            flush=True,
        )
        if args.json is not None:
            found = {"vllm": vllm.__version__, "speculation": speculative, "results": rows}
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
