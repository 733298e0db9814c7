"""Time optimizer steps on made-up data: tokens/s and peak memory for both kinds of head.

python benchmarks/train_step.py                     # SmolLM2-135M's shape, random weights
python benchmarks/train_step.py --target FOLDER     # a real target
python benchmarks/train_step.py --check --pack-length 2048   # FlexAttention against dense attention first
python benchmarks/train_step.py --profile           # where the time goes
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.config.training import TrainConfig
from peagle.target import Target, load_target
from peagle.training.attention import RowAttention
from peagle.training.distributed import World
from peagle.training.partition import forward_chunk
from peagle.training.prefetch import prefetch
from peagle.training.prepare import Run, prepare
from peagle.training.prove import prove_attention
from peagle.training.step import pack_gradients, train_step
from peagle.training.timing import Marks


@dataclass
class Example:
    input_ids: np.ndarray
    answer_mask: np.ndarray


class Answers:
    """Documents of log-normal length whose first 60 tokens are the prompt."""

    fingerprint = "made-up"

    def __init__(self, count: int, longest: int, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        lengths = np.clip(rng.lognormal(6.2, 0.8, count), 80, longest).astype(int)
        self.examples = [Example(rng.integers(20, vocab_size, n).astype(np.int32), np.arange(n) >= 60) for n in lengths]

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def token_counts(self, vocab_size: int) -> np.ndarray:
        return np.bincount(np.concatenate([e.input_ids[e.answer_mask] for e in self.examples]), minlength=vocab_size)


def smollm2_shaped(device: str) -> Target:
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32)
    return Target(model, None, "random-smollm2", frozenset({2}))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device: str, name: str, repeats: int, function) -> None:  # type: ignore[no-untyped-def]
    function()
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronize(device)
    print(f"    {name:<34}{1e3 * (time.perf_counter() - began) / repeats:9.1f} ms")


def check(run: Run, batch) -> None:  # type: ignore[no-untyped-def]
    """One pack's loss and gradients with the run's attention and with the dense one."""
    plan, weights, target = run.plan, run.weights, run.target_states.target
    n = plan.config.pack_length
    aux, hidden = run.target_states.read(batch, 0, len(batch.packs))
    found = []
    for backend in (plan.backend, "dense"):
        on = replace(plan, backend=backend)
        loss = float(pack_gradients(on, weights, target, batch.packs[0], aux[:n], hidden[:n]).loss)
        found.append((loss, torch.cat([p.grad.flatten() for p in weights.parameters])))
        weights.optimizer.zero_grad()
    error = float((found[0][1] - found[1][1]).norm() / found[1][1].norm())
    losses = f"{found[0][0]:.6f} {found[1][0]:.6f}"
    print(f"    {plan.backend} against dense: loss {losses}, gradients differ by {error:.2e}")


def measure(args: argparse.Namespace, target: Target, kind: str) -> None:
    device = target.device.type
    config = TrainConfig(
        target="-", data="-", output=tempfile.gettempdir() + "/peagle-benchmark-unused", kind=kind,
        layers=args.layers if kind == "p-eagle" else args.eagle3_layers, pack_length=args.pack_length,
        packs_per_step=args.packs, k_train=args.k_train, chunk_size=args.chunk_size, attention=args.attention,
        compile=args.compile, loss_kernel=args.loss_kernel, loss_rows=args.loss_rows, loss=args.loss,
        validation_documents=0, max_steps=10**6,
    )  # fmt: skip
    answers = Answers(args.documents, min(args.longest, args.pack_length), target.vocab_size)
    run = prepare(config, target, answers, lambda text: print("   ", text), World())
    weights, target_states, state = run.weights, run.target_states, run.state
    began = time.perf_counter()
    plan = run.plan = prove_attention(run.plan, weights, target_states, 0)
    synchronize(device)
    print(f"    first pack, compilation included: {time.perf_counter() - began:.1f} s")
    batches = prefetch(plan.maker, plan.schedule, 0, None, device == "cuda")
    if args.check:
        check(run, next(batches).to(target.device))
    for _ in range(args.warmup):
        train_step(plan, weights, target_states, state, next(batches), 1e-4)
    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began, tokens, rows, waited = time.perf_counter(), 0, 0, 0.0
    marks = Marks(target.device)
    marks("start")
    for _ in range(args.steps):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        train_step(plan, weights, target_states, state, batch, 1e-4, marks)
        tokens, rows = tokens + batch.tokens, rows + batch.rows
    synchronize(device)
    seconds = time.perf_counter() - began
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB" if device == "cuda" else ""
    print(f"  {kind}: {tokens / seconds:,.0f} tokens/s, {rows / seconds:,.0f} supervised rows/s, "
          f"{1e3 * seconds / args.steps:.0f} ms a step{peak}")  # fmt: skip
    for name, spent in marks.seconds().items():
        print(f"    {name:<34}{1e3 * spent / args.steps:9.1f} ms a step{100 * spent / seconds:6.1f} %")
    print(f"    {'the host waited for a batch':<34}{1e3 * waited / args.steps:9.1f} ms a step")

    # the parts of a step, one after another
    host = next(batches)
    began = time.perf_counter()
    packs = plan.schedule.epoch(0)[0]
    plan.maker.make(0, packs, 1)
    print(f"    {'making a batch (own thread)':<34}{1e3 * (time.perf_counter() - began):9.1f} ms")
    batch = host.to(target.device)
    n = config.pack_length
    states = lambda: target_states.read(batch, 0, len(batch.packs))  # noqa: E731
    timed(device, f"target states, {len(batch.groups)} calls", 3, states)
    aux, hidden = states()
    chunk = batch.packs[0][0]

    def forward() -> None:
        with torch.no_grad():
            forward_chunk(weights.copy.compute, chunk, aux[:n], RowAttention(chunk, plan.backend))

    if len(batch.packs[0]) == 1:
        timed(device, "drafter forward, one pack", 3, forward)
    one = lambda: pack_gradients(plan, weights, target, batch.packs[0], aux[:n], hidden[:n])  # noqa: E731
    timed(device, "forward, loss, backward, one pack", 3, one)
    weights.optimizer.zero_grad()
    if args.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profile:
            train_step(plan, weights, target_states, state, host, 1e-4)
            synchronize(device)
        key = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=60))
    batches.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", help="model folder or id (default: random weights of SmolLM2-135M's shape)")
    parser.add_argument("--kinds", default="p-eagle,eagle3")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--eagle3-layers", type=int, default=1)
    parser.add_argument("--k-train", type=int, default=8)
    parser.add_argument("--pack-length", type=int, default=8192)
    parser.add_argument("--packs", type=int, default=4)
    parser.add_argument("--chunk-size", type=lambda v: v if v == "auto" else int(v), default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--loss", default="soft")
    parser.add_argument("--loss-kernel", default="auto", help="auto (Triton) or compile")
    parser.add_argument("--loss-rows", type=lambda v: v if v == "auto" else int(v), default="auto")
    parser.add_argument("--documents", type=int, default=2000)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    target = load_target(args.target, device=args.device) if args.target else smollm2_shaped(args.device)
    for kind in args.kinds.split(","):
        measure(args, target, kind)


if __name__ == "__main__":
    main()
