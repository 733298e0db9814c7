"""Our P-EAGLE trainer beside speculators 0.9.0's on one card, one after the other, and the flat pass until it fails.

python benchmarks/long_beside.py -o beside                          # one H200: at most 240 s in all
python benchmarks/long_beside.py -o beside --legs speculators:8192,4096   # a part; its rows replace those of before
python benchmarks/long_beside.py -o tiny --tiny --device cpu        # tiny dimensions, on a CPU in about a minute

Needs what long_speculators.py names; a side that cannot start is a failed row. Every side is a process of its own. All
import at once and then measure one after the other: ours at 8K, speculators at 8K and, while time is left, 4K, 2K, 16K,
32K, the flat pass at 16K, 32K, 8K (lengths from a failed one on are left out), ours at 4K, 2K, 16K. A row is written to
OUTPUT/results.json as soon as it is there; what a side prints beside that goes to OUTPUT/SIDE.log. A point that takes
longer than --point-seconds, compilation included, is stopped and written down as such; the side starts anew with its
next length. Inductor's and Triton's caches are left on disk: what was compiled once is not compiled again later.

What is timed: `seconds` is forward and backward, gradients left in float32, optimizer's moments in memory but not
touched; `optimizer_step` the same with clipping and fused AdamW. Both sides train the same rows (K, r, anchors,
supervised ones) of one document of random states with the same dimensions and as many parameters, bf16 products under
float32 weights; warm-up ends with a step that compiles nothing. Ours makes the teacher's logits over the whole
vocabulary, speculators over the draft vocabulary only. Peak memory is what PyTorch allocated, of that process.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

LEGS = "peagle:8192 speculators:8192,4096,2048,16384,32768 flat:16384,32768,8192 peagle:4096,2048,16384"
TINY_LEGS = "peagle:48 speculators:48,32,16,64 flat:32,64,16 peagle:32,16,64"
FLAT_SECONDS = 60  # kept for the flat pass, whatever comes before it


class Side:
    """A process that measures one side; its lines of JSON arrive in `lines`, None at their end."""

    def __init__(self, side: str, log: Path, command: Sequence[str] = ()) -> None:
        self.side, self.log = side, log.open("ab")
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        self.process = subprocess.Popen(
            [*(command or (sys.executable, __file__, "--work", side))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.log, env=environment, process_group=0,
        )  # fmt: skip
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self.reader.start()

    def _read(self, stream: IO[bytes]) -> None:
        for line in stream:
            try:
                self.lines.put(json.loads(line))
            except ValueError:
                self.log.write(line)
        self.lines.put(None)

    def begin(self, word: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended then; its log says why
            self.process.stdin.write(json.dumps(word).encode() + b"\n")
            self.process.stdin.close()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.reader.join(5)
        self.log.close()


class Results:
    """results.json, rewritten after every row."""

    def __init__(self, file: Path, facts: dict[str, Any]) -> None:
        self.file = file
        self.all: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
        self.all |= facts

    def add(self, side: str, row: dict[str, Any]) -> None:
        key = (row["length"], row.get("chunk_size"))
        rows = [old for old in self.all.get(side, []) if (old["length"], old.get("chunk_size")) != key]
        self.all[side] = sorted([*rows, row], key=lambda r: (r["length"], -r.get("chunk_size", 0)))
        self.save()
        show(side, row)

    def save(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partly = self.file.with_suffix(".part")
        partly.write_text(json.dumps(self.all, indent=1) + "\n")
        partly.replace(self.file)


def show(side: str, row: dict[str, Any]) -> None:
    name = side + (f" (chunks of {row['chunk_size']})" if "chunk_size" in row else "")
    text = [f"{name:<26} N = {row['length']:>6}:"]
    if "failed" in row:
        text.append(f"{row['failed']}: {row['message']}")
    if "tokens_per_second" in row:
        whole = row["optimizer_step"]
        text.append(
            f"{row['tokens_per_second']:,.0f} tokens/s, {row['seconds']:.3f} s (slowest {row['slowest_seconds']:.3f}); "
            f"with optimizer {whole['tokens_per_second']:,.0f}; {row['rows']} rows, "
            f"warm-up {' '.join(f'{s:.1f}' for s in row['warm_up_seconds'])} s, {row['graphs_compiled']} graphs"
        )
        if row["compiled_while_measured"]:
            text.append("COMPILED WHILE MEASURED")
    if "seconds_with_compilation" in row:
        text.append(f"{row['rows']} rows, {row['seconds_with_compilation']:.1f} s with compilation")
    if "peak_gib" in row:
        text.append(f"peak {row['peak_gib']:.1f} GiB")
    print(" ".join(text), flush=True)


def follow(side: Side, word: dict[str, Any], results: Results, limit: float, end: float) -> list[int]:
    """Let a side measure; returns the lengths that were not begun when it was stopped."""
    left, doing, last, begun = list(word["lengths"]), {"length": word["lengths"][0]}, "starting", False
    began = time.monotonic()
    side.begin(word)
    while True:
        wait = min(began + limit, end) - time.monotonic()
        try:
            line = side.lines.get(timeout=max(wait, 0.01))
        except queue.Empty:
            late = "its time is over" if time.monotonic() >= end else f"point took over {limit:g} s"
            stopped = {
                "failed": "stopped",
                "message": f"{late}; last: {last}",
                "seconds_so_far": time.monotonic() - began,
            }
            results.add(side.side, doing | stopped)
            return [n for n in left if n != doing["length"]]
        if line is None:
            code = side.process.wait()
            if code:
                results.add(
                    side.side, doing | {"failed": f"exit {code}", "message": f"see {side.side}.log; last: {last}"}
                )
            return left if begun and code else []
        event = line.pop("event")
        last = f"{event} {json.dumps(line)}" if event != "row" else "row"
        if event == "begin":
            doing, began, begun = line, time.monotonic(), True
            left = [n for n in left if n != line["length"]]
        elif event == "row":
            results.add(side.side, line["row"])
            began = time.monotonic()
        elif event == "ready":
            print(f"{side.side}: {line['trained_parameters']:,} parameters trained", flush=True)
            results.all.setdefault("sides", {})[side.side] = line
            results.save()


def verdict(results: dict[str, Any]) -> None:
    """Our tokens/s over theirs and our peak memory over theirs, at every length that both have."""
    for theirs in results.get("speculators", []):
        for ours in results.get("peagle", []):
            if ours["length"] != theirs["length"] or "failed" in ours or "failed" in theirs:
                continue
            speed = ours["tokens_per_second"] / theirs["tokens_per_second"]
            whole = ours["optimizer_step"]["tokens_per_second"] / theirs["optimizer_step"]["tokens_per_second"]
            memory = f", peak memory {ours['peak_gib'] / theirs['peak_gib']:.2f}" if "peak_gib" in ours else ""
            print(
                f"N = {ours['length']}, chunks of {ours['chunk_size']}: tokens/s {speed:.2f} times speculators' "
                f"({whole:.2f} with optimizer){memory}; rows {ours['rows']} and {theirs['rows']}"
            )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("beside"))
    parser.add_argument("--legs", help=f"SIDE:LENGTHS in order, by default: {LEGS}")
    parser.add_argument("--chunk-sizes", default="4096", help="ours; the first at every length")
    parser.add_argument("--seconds", type=float, default=240, help="all of it ends after so many")
    parser.add_argument("--point-seconds", type=float, default=150)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.work:
        from long_points import work

        work(args.work)
        return {}
    began = time.monotonic()
    end = began + args.seconds - 2
    legs = [leg.split(":") for leg in (args.legs or (TINY_LEGS if args.tiny else LEGS)).split()]
    sizes = [32, 16] if args.tiny else [int(size) for size in args.chunk_sizes.split(",")]
    args.output.mkdir(parents=True, exist_ok=True)
    start = lambda side: Side(side, args.output / f"{side}.log")  # noqa: E731
    sides = [start(side) for side, _ in legs]  # they import while the first measures nothing yet
    try:
        import torch
        from long_common import EIGHT_B, TINY, facts

        device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
        results = Results(args.output / "results.json", facts(TINY if args.tiny else EIGHT_B, torch.device(device)))
        for place, (name, text) in enumerate(legs):
            lengths = [int(n) for n in text.split(",")]
            stop = end - FLAT_SECONDS * any(later == "flat" for later, _ in legs[place + 1 :]) * (not args.tiny)
            while lengths and time.monotonic() < stop:
                word = {"lengths": lengths, "chunk_sizes": sizes, "device": device, "tiny": args.tiny}
                lengths = follow(sides[place], word, results, args.point_seconds, stop)
                sides[place].stop()
                if lengths and time.monotonic() < stop:
                    sides[place] = start(name)
            for n in lengths:
                print(f"{name:<26} N = {n:>6}: not reached in {args.seconds:g} s", flush=True)
            print(f"  {name}: done after {time.monotonic() - began:.1f} s", flush=True)
    finally:
        for side in sides:
            if side.process.poll() is None:
                side.stop()
    verdict(results.all)
    return results.all


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stops the sides too
    main()
