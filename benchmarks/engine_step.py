"""Step time of the engine against its floor, in process, with random weights and synthetic acceptance.

    python benchmarks/engine_step.py --shape llama-8b --heads p-eagle:4:7,eagle3:1:3,plain --concurrency 1,8,64
    python benchmarks/engine_step.py --shape tiny --device cpu --concurrency 1,4 --steps 8 --rounds 2

A head is KIND:LAYERS:K. The floor is the time of a step whose passes (the target's, then the drafter's) each take the
longer of two times, at the rates measured in the same run: reading once what they must read (every layer's weights, the
LM head, keys and values of all requests), and the products of their rows with those weights. --profile prints where the
time of a step goes on the device. --chain measures every head once for each of its entries: with the chains of early
launches that were chosen when the models were loaded (tuned), without any (none), or in every layer with the
configurations that are tried first (default) or those that benchmarks/few_rows.py has written to a file.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.bench.json_file import check_writable, write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.drafter import Drafter, DrafterConfig
from peagle.engine import Engine, SamplingParams
from peagle.engine.loading import prepare_drafter, prepare_for_inference
from peagle.target import Target

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
    },
    "smollm2-135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
    },
}
WARM_STEPS = 8


@dataclass(frozen=True)
class Head:
    """kind "plain" has neither layers nor drafts."""

    kind: str
    layers: int = 0
    k: int = 0

    @classmethod
    def parse(cls, text: str) -> Head:
        kind, *numbers = text.split(":")
        if kind == "plain" and not numbers:
            return cls(kind)
        if kind not in ("p-eagle", "eagle3") or len(numbers) != 2 or not all(n.isdigit() for n in numbers):
            raise SystemExit(f"--heads: got {text!r}, expected plain or KIND:LAYERS:K with KIND p-eagle or eagle3")
        return cls(kind, int(numbers[0]), int(numbers[1]))

    @property
    def passes(self) -> int:
        return self.k if self.kind == "eagle3" else min(self.k, 1)

    def __str__(self) -> str:
        return self.kind if self.kind == "plain" else f"{self.kind} {self.layers}L K={self.k}"


def make_target(shape: dict[str, Any], max_model_len: int, device: torch.device, dtype: torch.dtype) -> Target:
    """A Llama with random weights, made on the device."""
    config = LlamaConfig(**shape, max_position_embeddings=max_model_len, rope_theta=500000.0, rms_norm_eps=1e-5)
    config.tie_word_embeddings = False
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    return Target(model, None, "random weights")


def make_drafter(
    head: Head, target: Target, shape: dict[str, Any], max_model_len: int, draft_vocab_size: int = 0
) -> Drafter:
    """A head with random weights; with a draft vocabulary it has an LM head of its own."""
    n = target.num_layers
    config = DrafterConfig(
        kind=head.kind,  # type: ignore[arg-type]
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_hidden_layers=head.layers,
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        vocab_size=shape["vocab_size"],
        draft_vocab_size=draft_vocab_size,
        own_lm_head=draft_vocab_size > 0,
        aux_hidden_state_layer_ids=(2, n // 2, n - 3),
        max_position_embeddings=max_model_len,
        mask_token_id=shape["vocab_size"] - 1 if head.kind == "p-eagle" else None,
    )
    with torch.device(target.device):
        drafter = Drafter(config).to(target.dtype)
    return prepare_drafter(drafter, target)


def use_chain_of(text: str) -> None:
    """none, tuned, default, or the file of benchmarks/few_rows.py. Raises SystemExit for a file that holds no chain."""
    if text in ("none", "tuned") and not torch.cuda.is_available():
        return  # without Triton there is nothing to switch off
    from peagle.kernels.chain_tuning import MEASURED
    from peagle.kernels.chained_layer import Chain, use_chain
    from peagle.kernels.skinny_linear import Config

    if text == "none":
        use_chain(None)
    elif text == "tuned":
        use_chain("tuned")
    elif text == "default":
        use_chain(Chain(MEASURED))
    else:
        try:
            found = json.loads(Path(text).read_text())["chain"]
            use_chain(Chain({(mode, height, depth): Config(*config) for mode, height, depth, config in found}))
        except (OSError, ValueError, KeyError, TypeError) as error:
            expected = "expected none, default or tuned, or few_rows.py's file"
            raise SystemExit(f"--chain: got {text!r}, {expected} ({error})") from None


def rates(length: float, k: int) -> tuple[float, ...]:
    """The rates that synthetic_acceptance_length stands for, cut to what K drafts can give."""
    settings = {"model": "random", "num_speculative_tokens": k, "rejection_sample_method": "synthetic"}
    found = SpeculativeConfig.parse(settings | {"synthetic_acceptance_length": min(length, k + 1)}).synthetic_rates
    assert found is not None
    return found


def bandwidth(device: torch.device) -> float:
    """Bytes a second that a reduction reads; the best of several."""
    size = 4 * 2**30 if device.type == "cuda" else 2**28
    x = torch.zeros(size // 4, dtype=torch.float32, device=device)
    best = 0.0
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        x.sum()
        synchronize(device)
        best = max(best, size / (time.perf_counter() - start))
    return best


def product_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large product of random numbers; the best of several."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    best = 0.0
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        a @ b
        synchronize(device)
        best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Pass:
    """One pass of a model: bytes that it must read, operations of its products."""

    bytes: float
    operations: float

    def seconds(self, bandwidth: float, rate: float) -> float:
        return max(self.bytes / bandwidth, self.operations / rate)


def passes_of(engine: Engine, head: Head, concurrency: int, contexts: float) -> list[Pass]:
    """The passes of a step over `contexts` cached positions in all. Embeddings are looked up, not read; attention's
    operations are left out, being few."""

    def one(layers: torch.nn.Module, rows: int, lm_head: torch.Tensor, chosen: int, pools: Any, more: int = 0) -> Pass:
        size, each = sum(p.numel() for p in layers.parameters()) + more, lm_head.element_size()
        keys = sum(pool[0, 0].nbytes for layer in pools for pool in layer)
        return Pass((size + lm_head.numel()) * each + contexts * keys, 2.0 * (size * rows + lm_head.numel() * chosen))

    target, drafter, pools = engine.target, engine.drafter, engine.runner.kv_cache
    verified = concurrency * (head.k + 1)
    passes = [one(target.layers, verified, target.lm_head_weight, verified, pools)]
    if drafter is not None:
        assert engine.runner.draft_pass is not None
        pools, lm_head, fc = engine.runner.draft_pass.kv_cache, drafter.lm_head_weight(), drafter.fc.weight.numel()
        parallel = head.kind == "p-eagle"
        rows, drafts = (2 * head.k, head.k) if parallel else (head.k + 1, 1)
        passes.append(one(drafter.layers, concurrency * rows, lm_head, concurrency * drafts, pools, fc))
        passes += [one(drafter.layers, concurrency, lm_head, concurrency, pools)] * (head.passes - 1)
    return passes


def measure(
    engine: Engine, head: Head, concurrency: int, args: argparse.Namespace, speed: float, rate: float
) -> dict[str, Any]:
    """Decode `concurrency` requests at once and time rounds of steps in which nothing but decoding happens."""
    g = torch.Generator().manual_seed(concurrency)
    total = WARM_STEPS + args.steps * args.rounds + (args.profile_steps if args.profile else 0) + 4
    params = SamplingParams(max_tokens=total * (head.k + 1), temperature=args.temperature, ignore_eos=True)
    shape = (concurrency, args.prompt_tokens)
    prompts = torch.randint(0, engine.target.vocab_size, shape, generator=g).tolist()
    requests = [engine.add_request(f"{concurrency}-{i}", prompt, params) for i, prompt in enumerate(prompts)]
    while any(len(r.token_ids) == r.num_prompt for r in requests):
        engine.step()
    for _ in range(WARM_STEPS):
        engine.step()
    engine.stats.reset()
    before = sum(len(r.token_ids) for r in requests)
    times = []
    for _ in range(args.rounds):
        synchronize(engine.target.device)
        start = time.perf_counter()
        for _ in range(args.steps):
            engine.step()
        synchronize(engine.target.device)
        times.append((time.perf_counter() - start) / args.steps)
    after = sum(len(r.token_ids) for r in requests)
    spec = engine.stats.spec
    if args.profile:
        profile(engine, args.profile_steps)
    for request in requests:
        engine.abort(request.request_id)
    step = statistics.median(times)
    passes = passes_of(engine, head, concurrency, (before + after) / 2)
    floor = sum(one.seconds(speed, rate) for one in passes)
    return {
        "head": asdict(head),
        "concurrency": concurrency,
        "step_ms": [t * 1000 for t in times],
        "bytes": sum(one.bytes for one in passes),
        "operations": sum(one.operations for one in passes),
        "floor_ms": floor * 1000,
        "ratio": step / floor,
        "acceptance_length": spec.acceptance_length,
        "tokens_per_second": (after - before) / sum(times) / args.steps,
    }


def profile(engine: Engine, steps: int) -> None:
    """Print the kernels that a step spends its time in."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = engine.target.device.type == "cuda"
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as recorded:
        for _ in range(steps):
            engine.step()
        synchronize(engine.target.device)
    rows: dict[str, list[float]] = {}
    for event in recorded.events():
        if (event.device_type == torch.autograd.DeviceType.CUDA) == on_gpu:
            total = event.device_time_total if on_gpu else event.self_cpu_time_total
            entry = rows.setdefault(event.name, [0.0, 0.0])
            entry[0] += total / steps
            entry[1] += 1 / steps
    busy = sum(entry[0] for entry in rows.values())
    table = [["kernel", "us a step", "share", "calls a step"]]
    for name, (us, calls) in sorted(rows.items(), key=lambda item: -item[1][0])[:25]:
        table.append([name[:90], f"{us:.1f}", f"{us / busy:.1%}", f"{calls:.1f}"])
    table.append(["all", f"{busy:.1f}", "", f"{sum(entry[1] for entry in rows.values()):.1f}"])
    print(align(table) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--heads", default="p-eagle:4:7,eagle3:1:3,plain", help="KIND:LAYERS:K or plain, by commas")
    parser.add_argument("--acceptance-length", type=float, default=3.0, help="Tokens a step; at most K + 1.")
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=50, help="Steps a round.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    help = "tuned, none, default or a file of few_rows.py; several by commas."
    parser.add_argument("--chain", default="tuned", help=help)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--no-async-scheduling", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--profile-steps", type=int, default=10)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.json is not None:
        check_writable(args.json)
    for chain in args.chain.split(","):  # refused now rather than after the first
        use_chain_of(chain)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    heads = [Head.parse(text) for text in args.heads.split(",")]
    several = [int(text) for text in args.concurrency.split(",")]
    most_tokens = (WARM_STEPS + args.steps * args.rounds + args.profile_steps + 4) * (max(h.k for h in heads) + 1)
    max_model_len = args.prompt_tokens + most_tokens + 1
    facts = machine_facts(device, dtype)
    print(machine_line(facts))
    speed, rate = bandwidth(device), product_rate(device, dtype)
    print(f"measured: {speed / 1e9:.0f} GB/s read, {rate / 1e12:.3g} TFLOP/s in a large product\n")
    shape = SHAPES[args.shape]
    target = make_target(shape, max_model_len, device, dtype)
    prepare_for_inference(target)
    results = []
    arms = [(head, chain) for head in heads for chain in args.chain.split(",")]
    for head, chain in arms:
        use_chain_of(chain)
        drafter = None if head.kind == "plain" else make_drafter(head, target, shape, max_model_len)
        engine = Engine(
            target,
            drafter,
            head.k,
            EngineConfig(
                max_model_len=max_model_len,
                max_num_seqs=max(several),
                enable_prefix_caching=False,
                kv_cache_dtype=args.kv_cache_dtype,
                enforce_eager=args.enforce_eager,
                async_scheduling=not args.no_async_scheduling,
            ),
            rates(args.acceptance_length, head.k) if head.k else None,
        )
        for concurrency in several:
            if args.profile:
                print(f"{head}, chain {chain}, concurrency {concurrency}")
            results.append({"chain": chain} | measure(engine, head, concurrency, args, speed, rate))
        del engine, drafter
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    table = [["head", "chain", "concurrency", "step ms (median)", "min..max", "floor ms", "ratio", "AL", "tokens/s"]]
    for head, r in zip([head for head, _ in arms for _ in several], results, strict=True):
        times = r["step_ms"]
        table.append(
            [
                str(head),
                Path(r["chain"]).name,
                str(r["concurrency"]),
                f"{statistics.median(times):.3f}",
                f"{min(times):.3f}..{max(times):.3f}",
                f"{r['floor_ms']:.3f}",
                f"{r['ratio']:.2f}",
                f"{r['acceptance_length']:.2f}",
                f"{r['tokens_per_second']:.0f}",
            ]
        )
    print(f"{args.shape} with random weights, {args.prompt_tokens} prompt tokens, SYNTHETIC acceptance\n")
    print(align(table))
    products, chains = {}, {}
    if device.type == "cuda":
        from peagle.kernels import chain_tuning, skinny_linear

        products, chains = skinny_linear.findings(), chain_tuning.findings()
        print("\nproducts of few rows: " + "; ".join(f"{name}: {choice}" for name, choice in products.items()))
        print("chains, where tuned: " + "; ".join(f"{name}: {choice}" for name, choice in chains.items()))
    if args.json is not None:
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        content = {
            "machine": facts,
            "settings": settings,
            "bandwidth_bytes_per_second": speed,
            "product_operations_per_second": rate,
            "products": products,
            "chains": chains,
            "results": results,
        }
        write_json(args.json, content)


if __name__ == "__main__":
    main()
