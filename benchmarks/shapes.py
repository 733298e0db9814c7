"""Throughput of the engine on real model shapes, random weights and synthetic acceptance: the cost of a step, not text.

    python benchmarks/shapes.py --shape llama-8b --concurrency 1,8,64
    python benchmarks/shapes.py --shape gpt-oss-20b --arms plain,eagle3:1:3:2.65,p-eagle:4:7:3.94
    python benchmarks/shapes.py --shape tiny --device cpu --dtype float32 --concurrency 1,2 --output-tokens 16

An arm is plain or KIND:LAYERS:K:LENGTH, LENGTH being the acceptance length; EAGLE-3 drafts from 32,000 tokens, P-EAGLE
from the whole vocabulary. Every arm answers the same prompts (--prompt-tokens random tokens) with --output-tokens
tokens each, prefill included: what a stock vLLM script of the same shape measures, so that its tokens/s can stand
beside these when both ran on one card (acceptance from its `rejection_sample_method: "synthetic"`). gpt-oss has bf16
experts here, and with --mxfp4 such as its release has; --experts transformers leaves them to Transformers' module.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from engine_step import SHAPES, Head, make_drafter, make_target, rates, synchronize
from mxfp4_weights import fill_with_mxfp4
from transformers import GptOssConfig, GptOssForCausalLM

from peagle.bench.json_file import check_writable, write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.config.engine import EngineConfig
from peagle.engine import Engine, SamplingParams
from peagle.engine.loading import prepare_for_inference
from peagle.target import Target

# the drafter beside gpt-oss: a dense layer of the head that AWS published
GPT_OSS_HEAD = {
    "hidden_size": 2880,
    "intermediate_size": 8640,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
}
EAGLE3_DRAFT_VOCAB = 32000


@dataclass(frozen=True)
class Arm:
    head: Head
    length: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Arm:
        head, colon, length = text.rpartition(":")
        if not colon:
            return cls(Head.parse(text))
        try:
            return cls(Head.parse(head), float(length))
        except ValueError:
            raise SystemExit(f"--arms: got {text!r}, expected plain or KIND:LAYERS:K:LENGTH") from None


def gpt_oss_20b(max_model_len: int, device: torch.device, dtype: torch.dtype) -> Target:
    """gpt-oss-20b's shape (GptOssConfig's defaults are the 120B's but for these), made on the device."""
    config = GptOssConfig(num_hidden_layers=24, num_local_experts=32, max_position_embeddings=131072)
    config._attn_implementation = "eager"
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = GptOssForCausalLM(config)
    finally:
        torch.set_default_dtype(default)
    return Target(model, None, "random weights")


def run(engine: Engine, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    top = min(engine.target.vocab_size, 100000)
    prompts = [[rng.randrange(top // 100, top) for _ in range(args.prompt_tokens)] for _ in range(concurrency)]
    params = SamplingParams(max_tokens=args.output_tokens, temperature=0.0, ignore_eos=True)
    speeds = []
    for repeat in range(args.repeats + 1):
        synchronize(engine.target.device)
        began = time.perf_counter()
        requests = [
            engine.add_request(f"{concurrency}-{repeat}-{i}", prompt, params) for i, prompt in enumerate(prompts)
        ]
        while engine.has_unfinished:
            engine.step()
        speed = sum(len(r.output_token_ids) for r in requests) / (time.perf_counter() - began)
        if repeat:  # the first warms up
            speeds.append(speed)
        else:
            engine.stats.reset()
    spec = engine.stats.spec
    return {
        "concurrency": concurrency,
        "tokens_per_second": speeds,
        "acceptance_length": spec.acceptance_length if engine.drafter is not None else 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*sorted(SHAPES), "gpt-oss-20b"], default="llama-8b")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--arms", default="plain,eagle3:1:3:2.65,p-eagle:4:7:3.94")
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--experts", choices=("fused", "transformers"), default="fused", help="Of gpt-oss, on a GPU.")
    parser.add_argument("--mxfp4", action="store_true", help="Give gpt-oss weights that MXFP4 holds exactly.")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.json is not None:
        check_writable(args.json)
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    arms = [Arm.parse(text) for text in args.arms.split(",")]
    several = [int(text) for text in args.concurrency.split(",")]
    max_model_len = max(args.prompt_tokens + args.output_tokens, 4096)
    facts = machine_facts(device, dtype)
    print(machine_line(facts))
    if args.shape == "gpt-oss-20b":
        shape: dict[str, Any] = GPT_OSS_HEAD
        target = gpt_oss_20b(max_model_len, device, dtype)
        if args.mxfp4:
            fill_with_mxfp4(target.model)
    else:
        shape = SHAPES[args.shape]
        target = make_target(shape, max_model_len, device, dtype)
    prepare_for_inference(target, fuse_mixtures=args.experts == "fused")
    table = [["arm", "concurrency", "tokens/s (median)", "min..max", "AL"]]
    results = []
    for arm in arms:
        head = arm.head
        drafter = None
        if head.kind != "plain":
            vocab = EAGLE3_DRAFT_VOCAB if head.kind == "eagle3" and shape["vocab_size"] > EAGLE3_DRAFT_VOCAB else 0
            drafter = make_drafter(head, target, shape, max_model_len, vocab)
        config = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max(several),
            enable_prefix_caching=False,
            enforce_eager=args.enforce_eager,
        )
        engine = Engine(target, drafter, head.k, config, rates(arm.length, head.k) if head.k else None)
        engine.capture()
        for concurrency in several:
            found = run(engine, concurrency, args)
            results.append({"arm": str(head), **found})
            speeds = found["tokens_per_second"]
            line = [str(head), str(concurrency), f"{statistics.median(speeds):.0f}"]
            table.append([*line, f"{min(speeds):.0f}..{max(speeds):.0f}", f"{found['acceptance_length']:.2f}"])
            print("  ".join(table[-1]), flush=True)
            if args.json is not None:  # after every point: what was measured is kept
                settings = {name: value for name, value in vars(args).items() if name != "json"}
                write_json(args.json, {"machine": facts, "settings": settings, "results": results})
        del engine, drafter
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{args.shape} with random weights, SYNTHETIC acceptance\n")
    print(align(table))


if __name__ == "__main__":
    main()
