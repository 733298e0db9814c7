"""What the benchmarks of long sequences share: dimensions, timing, peak memory, the table and the plot."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

GIB = 2**30


@dataclass(frozen=True)
class Shape:
    """A head and the target that it is for."""

    hidden: int = 4096
    layers: int = 4
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 14336
    vocab: int = 128256
    draft_vocab: int = 32000
    depths: int = 8  # K
    keep_rate: float = 0.8  # r


EIGHT_B = Shape()
TINY = Shape(32, 2, 4, 2, 8, 48, 211, 97, 4)


def facts(shape: Shape, device: torch.device) -> dict[str, Any]:
    return {
        "shape": asdict(shape),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(device: torch.device, run: Callable[[], object]) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def measure(device: torch.device, length: int, step: Callable[[], object], times: int = 1) -> dict[str, Any]:
    """Tokens/s and the most memory held (weights and optimizer included) over some steps that are warmed up already."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    each = [seconds_of(device, step) for _ in range(times)]
    row: dict[str, Any] = {
        "length": length,
        "seconds": sum(each) / times,
        "slowest_seconds": max(each),
        "steps": times,
        "tokens_per_second": length * times / sum(each),
    }
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
    return row


def compilations() -> dict[str, int]:
    """Counters of Dynamo, AOTAutograd and Inductor: a step that leaves them as they were compiled nothing."""
    from torch._dynamo.utils import counters

    groups = ("frames", "stats", "aot_autograd", "inductor")
    return {f"{group}.{name}": int(count) for group in groups for name, count in counters[group].items()}


def sort_outside_triton() -> None:
    """Let Inductor leave sorts to ATen: that of a block mask's few hundred blocks compiles for minutes else."""
    from torch._inductor import lowering

    sort = torch.ops.aten.sort.stable
    lowering.lowerings[sort] = lowering.fallback_handler(sort)


def warm_up(device: torch.device, step: Callable[[], object], at_most: int, tell: Callable[..., None]) -> list[float]:
    """Run steps until one compiles nothing (two at least); seconds of each. `tell` hears of every step."""
    each: list[float] = []
    while len(each) < at_most:
        before = compilations()
        each.append(seconds_of(device, step))
        after = compilations()
        tell("warm-up step", seconds=each[-1], graphs=after.get("stats.unique_graphs", 0))
        if after == before and len(each) > 1:
            break
    return each


def until_it_fails(device: torch.device, length: int, row: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `row` measured at a length, or how it failed."""
    try:
        return row()
    except torch.OutOfMemoryError as error:
        failed: dict[str, Any] = {"length": length, "failed": "out of memory", "message": str(error).splitlines()[0]}
    except Exception as error:  # whatever the other program or the compiler raises is a result here
        name = "out of memory" if "out of memory" in str(error) else type(error).__name__
        failed = {"length": length, "failed": name, "message": str(error)[:400]}
    if device.type == "cuda":
        failed["peak_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        torch.cuda.empty_cache()
    return failed


def show(name: str, row: dict[str, Any]) -> None:
    peak = f", peak {row['peak_gib']:.1f} GiB" if "peak_gib" in row else ""
    if "failed" in row:
        print(f"{name:<24} N = {row['length']:>7}: {row['failed']}{peak}: {row['message']}", flush=True)
        return
    print(
        f"{name:<24} N = {row['length']:>7}: {row['tokens_per_second']:12,.0f} tokens/s, {row['seconds']:8.3f} s a step"
        f"{peak}",
        flush=True,
    )


def write(path: Path, results: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


def plot(path: Path, lines: dict[str, list[dict[str, Any]]], title: str) -> None:
    """Peak memory and tokens/s over the length, one line a name; failures are crosses at the height of the last one."""
    try:
        import matplotlib
    except ImportError:
        print(f"matplotlib is not installed: {path} is not drawn; --plot-only draws it from the JSON elsewhere")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for axis, key, label in zip(
        panels, ("peak_gib", "tokens_per_second"), ("peak memory, GiB", "tokens/s"), strict=True
    ):
        for name, rows in lines.items():
            good = [row for row in rows if "failed" not in row and key in row]
            (line,) = axis.plot([r["length"] for r in good], [r[key] for r in good], "o-", label=name)
            for row in rows:
                if "failed" in row and good:
                    axis.plot(row["length"], good[-1][key], "x", color=line.get_color(), markersize=11)
        axis.set_xscale("log", base=2)
        axis.set_xlabel("sequence length (crosses: failed)")
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    panels[0].legend()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
