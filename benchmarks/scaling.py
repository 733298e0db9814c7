"""Train the same batches on one process and on several: tokens/s, scaling efficiency, and how far the losses differ.

python benchmarks/scaling.py --target MODEL --processes 1,2        # one GPU a process, NCCL; else SmolLM2's shape
python benchmarks/scaling.py --tiny --device cpu --processes 1,2   # tiny dimensions, gloo, in seconds

Every number of processes is a torchrun of its own, one after the other, on made-up documents with the same packs a step
(`--packs`, a multiple of the processes), so each does its share of the same work. A number of processes N has the
efficiency tokens/s(N) / (N tokens/s(1)). Steps that compile are not timed; losses are of all steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from train_step import Answers, smollm2_shaped, synchronize
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.config.training import TrainConfig
from peagle.target import Target, load_target
from peagle.training.distributed import join, leave
from peagle.training.prefetch import prefetch
from peagle.training.prepare import prepare
from peagle.training.prove import prove_attention
from peagle.training.step import train_step


def tiny() -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=211, hidden_size=32, intermediate_size=48, num_hidden_layers=7, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config), None, "tiny", frozenset({2}))


def work(args: argparse.Namespace) -> None:
    """One process of a torchrun; the first one writes what was measured."""
    world, device = join(args.device)
    kind = device.split(":")[0]
    torch.manual_seed(0)
    target = tiny() if args.tiny else load_target(args.target, device=device) if args.target else smollm2_shaped(kind)
    config = TrainConfig(
        target="-", data="-", output=tempfile.gettempdir() + "/peagle-benchmark-unused", layers=args.layers,
        pack_length=args.pack_length, packs_per_step=args.packs, parallel=args.parallel if world.size > 1 else "ddp",
        validation_documents=0, max_steps=10**6, seed=1,
    )  # fmt: skip
    answers = Answers(args.documents, min(args.longest, args.pack_length), target.vocab_size)
    run = prepare(config, target, answers, lambda _text: None, world)
    plan = run.plan = prove_attention(run.plan, run.weights, run.target_states, 0)
    batches = prefetch(plan.maker, plan.schedule, 0, None, kind == "cuda")
    losses: list[float] = []
    tokens = seconds = 0.0
    for step in range(args.warmup + args.steps):
        batch = next(batches)
        synchronize(kind)
        world.agree([0.0])
        began = time.perf_counter()
        train_step(plan, run.weights, run.target_states, run.state, batch, 1e-4)
        synchronize(kind)
        (spent,) = world.agree([time.perf_counter() - began])  # of the slowest process
        losses.append(float(run.state.sums.loss))
        run.state.sums.loss.zero_()
        if step >= args.warmup:
            tokens, seconds = tokens + batch.tokens, seconds + spent
    batches.close()
    if world.first:
        row = {"processes": world.size, "tokens_per_second": tokens / seconds, "losses": losses}
        args.work.write_text(json.dumps(row))
    if run.weights.sharded is not None:
        run.weights.sharded.release()
    leave()


def launch(processes: int, output: Path) -> dict[str, Any]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subprocess.run([*torchrun, __file__, *sys.argv[1:], "--work", str(output)], check=True, env=environment)
    found: dict[str, Any] = json.loads(output.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="model folder or id (default: random weights of SmolLM2-135M's shape)")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--parallel", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--pack-length", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=8)
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.tiny:
        args.pack_length, args.longest, args.documents = 128, 120, 200
    if args.work is not None:
        work(args)
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for processes in (int(text) for text in args.processes.split(",")):
            rows.append(launch(processes, Path(folder) / "row.json"))
            row, one = rows[-1], rows[0]
            each = row["tokens_per_second"] / row["processes"]
            row["efficiency"] = each / (one["tokens_per_second"] / one["processes"])
            pairs = list(zip(row["losses"], one["losses"], strict=True))
            row["largest_loss_difference"] = max(abs(a - b) / abs(b) for a, b in pairs)
            print(
                f"{row['processes']} processes: {row['tokens_per_second']:,.0f} tokens/s, efficiency "
                f"{row['efficiency']:.2f}, losses within {row['largest_loss_difference']:.1e} of the first's",
                flush=True,
            )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
