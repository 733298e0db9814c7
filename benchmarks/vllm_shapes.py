"""The other half of benchmarks/shapes.py: the same shapes, prompts and synthetic acceptance in stock vLLM.

    python benchmarks/vllm_shapes.py --shape llama-8b --arm p-eagle:4:7:3.94 --concurrency 1,8,64 --json arm.json

Runs in vLLM's environment (nothing of this project is imported), one arm a process: plain or KIND:LAYERS:K:LENGTH.
Weights are random (`load_format="dummy"`), gpt-oss has MXFP4 experts, and drafts are accepted by chance
(`rejection_sample_method: "synthetic"`) to the acceptance length LENGTH. Several arms may load at once and wait for
their turns: --wait-for FILE measures when FILE is there. Every run's tokens/s is kept; the first runs of a shape still
compile, so compare the best.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 128000, "eos_token_id": 128009,
}  # fmt: skip
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "vocab_size": 201088, "max_position_embeddings": 131072, "initial_context_length": 4096, "rms_norm_eps": 1e-5,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "sliding_window": 128, "swiglu_limit": 7.0,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "hidden_act": "silu",
    "attention_bias": True, "attention_dropout": 0.0, "tie_word_embeddings": False, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "eos_token_id": 200002, "pad_token_id": 199999,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
    },
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"llama-8b": LLAMA_8B, "gpt-oss-20b": GPT_OSS_20B}
HEAD_INTERMEDIATE = {"llama-8b": 14336, "gpt-oss-20b": 8640}  # gpt-oss's as the published head's
EAGLE3_DRAFT_VOCAB = 32000
CAPTURED = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def head_config(shape: str, kind: str, layers: int) -> dict[str, Any]:
    """EAGLE-3 drafts from 32,000 tokens, P-EAGLE from the whole vocabulary, as in benchmarks/shapes.py."""
    target = SHAPES[shape]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": target["hidden_size"],
        "intermediate_size": HEAD_INTERMEDIATE[shape], "num_hidden_layers": layers,
        "num_attention_heads": target["num_attention_heads"], "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"], "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": False, "vocab_size": target["vocab_size"],
        "draft_vocab_size": EAGLE3_DRAFT_VOCAB, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    if kind == "p-eagle":
        config |= {
            "parallel_drafting": True, "ptd_token_id": target["vocab_size"] - 68,
            "draft_vocab_size": target["vocab_size"],
        }  # fmt: skip
    return config


def write_models(folder: Path, shape: str, arm: str) -> dict[str, Any] | None:
    """Writes the target's and the head's config under `folder`; returns vLLM's speculative_config."""
    (folder / "target").mkdir(parents=True)
    (folder / "target" / "config.json").write_text(json.dumps(SHAPES[shape]))
    if arm == "plain":
        return None
    kind, layers, k, length = arm.split(":")
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text(json.dumps(head_config(shape, kind, int(layers))))
    speculative = {
        "method": "eagle3", "model": str(folder / "head"), "num_speculative_tokens": int(k),
        "rejection_sample_method": "synthetic", "synthetic_acceptance_length": float(length),
    }  # fmt: skip
    return speculative | ({"parallel_drafting": True} if kind == "p-eagle" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-8b")
    parser.add_argument("--arm", default="plain")
    parser.add_argument("--concurrency", default="1,8,64")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--kv-cache-gib", type=float, default=8)
    parser.add_argument("--wait-for", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would be compiled first
    import vllm

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speculative = write_models(folder, args.shape, args.arm)
        users = [int(c) for c in args.concurrency.split(",")]
        llm = vllm.LLM(
            model=str(folder / "target"), load_format="dummy", skip_tokenizer_init=True, max_model_len=4096,
            speculative_config=speculative, max_num_seqs=max(64, *users), max_num_batched_tokens=8192, seed=0,
            compilation_config={"cudagraph_capture_sizes": CAPTURED}, async_scheduling=True,
            gpu_memory_utilization=0.5, kv_cache_memory_bytes=int(args.kv_cache_gib * 2**30),
            enable_prefix_caching=False, disable_log_stats=False,
        )  # fmt: skip
        print(f"ready: {args.shape} {args.arm}, vLLM {vllm.__version__}", flush=True)
        while args.wait_for is not None and not args.wait_for.exists():
            time.sleep(0.2)
        rng, rows = random.Random(0), []
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=args.output_tokens, ignore_eos=True, detokenize=False
        )  # fmt: skip
        for c in users:
            prompts = [{"prompt_token_ids": rng.choices(range(1000, 100000), k=args.prompt_tokens)} for _ in range(c)]
            rates = []
            for _ in range(args.repeats):
                begin = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                rates.append(sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - begin))
            rows.append({"shape": args.shape, "arm": args.arm, "concurrency": c, "tokens_per_second": rates})
            print(f"{args.arm} {c}: {max(rates):.1f} ({min(rates):.1f}..{max(rates):.1f})", flush=True)
        counts = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
        drafts = counts.get("vllm:spec_decode_num_drafts")
        length = 1 + counts["vllm:spec_decode_num_accepted_tokens"] / drafts if drafts else 1.0
        print(f"acceptance length {length:.3f}")
        if args.json is not None:
            found = {"vllm": vllm.__version__, "acceptance_length": length, "results": rows}
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
