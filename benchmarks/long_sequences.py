"""Train a head of an 8B target on sequences of 8K to 128K tokens: tokens/s and peak memory of one optimizer step.

python benchmarks/long_sequences.py -o long                    # on one GPU; long/results.json, long/lengths.png
python benchmarks/long_sequences.py -o long --parts flat       # a part alone; results are added to the same file
python benchmarks/long_sequences.py -o tiny --tiny             # tiny dimensions, on a CPU in seconds
python benchmarks/long_sequences.py -o long --plot-only --beside beside/results.json

Parts: `matmul` (the card's bf16 rate), `lengths` (the sequence partition), `attention` (alone, at 8K), and `flat` (all
N K rows at once, the plain mask as a FlexAttention block mask, until it fails). The target's states are random numbers
on the device, so no target runs; a step is everything else that training does: teacher logits over the whole
vocabulary, forward, loss, backward, clipping, AdamW in float32, the bf16 copy.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from long_common import EIGHT_B, TINY, facts, measure, plot, seconds_of, show, until_it_fails, write
from long_head import Training, make_chunks, sampled_rows
from long_plain import attention_alone, flat, matmul_rate, show_attention

from peagle.training.chunks import Chunk
from peagle.training.partition import train_pack


def partition(training: Training, length: int, size: int, times: int) -> dict[str, Any]:
    """One optimizer step over a sequence, chunk by chunk."""
    began = time.perf_counter()
    chunks = make_chunks(training, sampled_rows(training.shape, length, training.shape.keep_rate), size)
    made = time.perf_counter() - began
    aux, hidden = training.states(length)
    loss = training.chunk_loss(hidden)

    def run(chosen: list[Chunk]) -> None:
        train_pack(training.copy.compute, chosen, aux, loss, training.backend)

    # one chunk of each shape beside the last one compiles all that the whole sequence needs
    shapes = {chunk.num_rows: chunk for chunk in reversed(chunks[:-1])}
    warm = seconds_of(training.device, lambda: run([*sorted(shapes.values(), key=lambda c: c.start), chunks[-1]]))
    training.update()  # makes Adam's state

    def step() -> None:
        run(chunks)
        training.update()

    row = measure(training.device, length, step, times)
    return row | {
        "rows": sum(chunk.num_rows for chunk in chunks),
        "chunk_size": size,
        "chunks": len(chunks),
        "shapes": len({chunk.num_rows for chunk in chunks}),
        "seconds_to_make_rows": made,
        "seconds_to_warm_up": warm,
    }


def draw(folder: Path, results: dict[str, Any], beside: Path | None) -> None:
    lines = {"peagle, partition": results.get("lengths", []), "peagle, flat (all N K rows)": results.get("flat", [])}
    if beside is not None:
        other = json.loads(beside.read_text())
        version = other.get("sides", {}).get("speculators", {}).get("version", "")
        # an optimizer step, as in this table, where forward and backward alone were timed too
        measured = [row for row in other.get("speculators", []) if row.get("failed") != "stopped"]  # time was over
        rows = [row | row.get("optimizer_step", {}) for row in measured]
        lines |= {f"speculators {version}": rows}
        lines["peagle, flat (all N K rows)"] = lines["peagle, flat (all N K rows)"] or other.get("flat", [])
    lines = {name: rows for name, rows in lines.items() if rows}
    title = f"{results['device']}, {results['date']}: one optimizer step of a head of an 8B target, K = 8, r = 0.8"
    plot(folder / "lengths.png", lines, title)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("long"))
    parser.add_argument("--parts", default="matmul,lengths,attention,flat")
    parser.add_argument("--lengths", default="8192,32768,65536,131072")
    parser.add_argument("--flat-from", type=int, default=8192, help="first length of the flat pass; doubled until")
    parser.add_argument("--flat-to", type=int, default=32768)
    parser.add_argument("--attention-length", type=int, default=8192)
    parser.add_argument("--chunk-size", type=int, default=4096)
    parser.add_argument("--attention", default="auto", choices=["auto", "flash", "flex", "dense"])
    parser.add_argument("--steps", type=int, default=1, help="measured steps a length (3 up to 8192 tokens)")
    parser.add_argument("--seconds", type=float, default=540, help="start nothing new after so many")
    parser.add_argument(
        "--activation-checkpointing", action="store_true", help="rows of `lengths` under `checkpointed`"
    )
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--beside", type=Path, help="results.json of long_beside.py, for the plot")
    parser.add_argument("--plot-only", action="store_true")
    args = parser.parse_args(arguments)
    began, device, file = time.monotonic(), torch.device(args.device), args.output / "results.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if args.plot_only:
        draw(args.output, results, args.beside)
        return results
    shape = TINY if args.tiny else EIGHT_B
    results |= facts(shape, device)
    late = lambda: time.monotonic() - began > args.seconds  # noqa: E731
    training = Training(shape, device, args.attention)
    results["attention_backend"] = training.backend
    training.copy.compute.checkpoint_layers = args.activation_checkpointing
    lengths = "checkpointed" if args.activation_checkpointing else "lengths"
    lengths += f" ({args.attention})" * (args.attention != "auto")
    count = sum(p.numel() for p in training.parameters)
    results["trained_parameters"] = count
    print(
        f"{count:,} parameters trained; {results['device']}; ready after {time.monotonic() - began:.1f} s", flush=True
    )
    for part in args.parts.split(","):
        if part == "matmul":
            results["matmul_flops"] = matmul_rate(device, 8192 if device.type == "cuda" else 256)
            print(f"bf16 matmul: {results['matmul_flops'] / 1e12:.1f} TFLOP/s")
        elif part == "lengths":
            results[lengths] = []
            for n in (int(text) for text in args.lengths.split(",")):
                if late():
                    print(f"N = {n}: not reached in {args.seconds:g} s")
                    continue
                times = max(args.steps, 3 if n <= 8192 else 1)
                row = until_it_fails(device, n, lambda n=n, t=times: partition(training, n, args.chunk_size, t))
                training.forget()
                results[lengths].append(row)
                show("partition" + ", checkpointed" * args.activation_checkpointing, row)
                write(file, results)
        elif part == "attention" and not late():
            results["attention"] = attention_alone(training, args.attention_length, 10 if device.type == "cuda" else 1)
            show_attention(results["attention"], results.get("matmul_flops"))
        elif part == "flat":
            results["flat"] = []
            n = args.flat_from
            while n <= args.flat_to and not late():
                row = until_it_fails(device, n, lambda n=n: flat(training, n, 1))
                results["flat"].append(row)
                show("flat, N K rows", row)
                if "failed" in row:
                    break
                n *= 2
        write(file, results)
        print(f"  {part}: done after {time.monotonic() - began:.1f} s", flush=True)
    draw(args.output, results, args.beside)
    return results


if __name__ == "__main__":
    main()
