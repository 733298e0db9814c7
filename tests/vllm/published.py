"""The heads that AWS published (gpt-oss-20b, gpt-oss-120b, Qwen3-Coder-30B-A3B) and their targets, full size and tiny.

Known of them: model cards and blog (4 layers, K, 1.7B parameters of the 120B head), and for the 20B what others wrote
who run it: own embeddings and LM head over the whole vocabulary, `ptd_token_id` 201020, `mask_hidden` (1, 1, 8640), d2t
and t2d that map every id to itself, llama3 RoPE, and auxiliary layers that were traced in vLLM to its default, so that
its config seems to name none.
What nobody says (the drafter's attention and MLP sizes) is set to the target's attention and four times the hidden
size; with those the 120B head has the 1.7B parameters of its model card.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.cli.conftest import run_peagle
from tests.conftest import COMMON, MASK, VOCAB, make_tokenizer, randomise

LAYERS = 4


@dataclass(frozen=True)
class Published:
    """A published head with its target's sizes."""

    name: str
    k_train: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    target_layers: int
    mask_token: int
    max_length: int = 131072

    @property
    def aux(self) -> tuple[int, ...]:
        return (2, self.target_layers // 2, self.target_layers - 3)

    def config_json(self) -> dict[str, object]:
        """config.json with the keys that those heads have, and none of this package's own."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            "max_position_embeddings": self.max_length,
            "vocab_size": self.vocab,
            "draft_vocab_size": self.vocab,
            "parallel_drafting": True,
            "ptd_token_id": self.mask_token,
            "torch_dtype": "bfloat16",
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that inference reads as the files name them, written out by hand."""
        h, q, kv, mlp = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim, 4 * self.hidden
        shapes: dict[str, tuple[int, ...]] = {
            "embed_tokens.weight": (self.vocab, h),
            "lm_head.weight": (self.vocab, h),
            "fc.weight": (h, 3 * h),
            "mask_hidden": (1, 1, 3 * h),
            "norm.weight": (h,),
            "midlayer.hidden_norm.weight": (h,),
        }
        for layer, width in (("midlayer", 2 * h), *((f"layers.{i}", h) for i in range(1, LAYERS))):
            shapes |= {
                f"{layer}.self_attn.q_proj.weight": (q, width),
                f"{layer}.self_attn.k_proj.weight": (kv, width),
                f"{layer}.self_attn.v_proj.weight": (kv, width),
                f"{layer}.self_attn.o_proj.weight": (h, q),
                f"{layer}.mlp.gate_proj.weight": (mlp, h),
                f"{layer}.mlp.up_proj.weight": (mlp, h),
                f"{layer}.mlp.down_proj.weight": (h, mlp),
                f"{layer}.input_layernorm.weight": (h,),
                f"{layer}.post_attention_layernorm.weight": (h,),
            }
        return shapes

    def module_shapes(self) -> dict[str, tuple[int, ...]]:
        """The same under the names of the module that they are loaded into."""
        return {name.replace("midlayer", "layers.0"): shape for name, shape in self.shapes().items()}


GPT_OSS: dict[str, int] = {
    "hidden": 2880, "heads": 64, "kv_heads": 8, "head_dim": 64, "vocab": 201088, "mask_token": 201020
}  # fmt: skip
HEADS = {
    "gpt-oss-20b": Published("amazon/GPT-OSS-20B-P-EAGLE", k_train=10, target_layers=24, **GPT_OSS),
    "gpt-oss-120b": Published("amazon/gpt-oss-120b-p-eagle", k_train=8, target_layers=36, **GPT_OSS),
    "qwen3-coder-30b": Published(
        "amazon/Qwen3-Coder-30B-A3B-Instruct-P-EAGLE", 18, hidden=2048, heads=32, kv_heads=4, head_dim=128,
        vocab=151936, target_layers=48, mask_token=151930, max_length=262144,
    ),
}  # fmt: skip


def target_config(name: str) -> GptOssConfig | Qwen3MoeConfig:
    """A target's config at full size, but for its experts' number and what no head depends on."""
    head = HEADS[name]
    sizes = {
        "hidden_size": head.hidden,
        "num_hidden_layers": head.target_layers,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "vocab_size": head.vocab,
        "max_position_embeddings": head.max_length,
    }
    if name.startswith("gpt-oss"):
        return GptOssConfig(**sizes)
    return Qwen3MoeConfig(**sizes, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)


def write_headers(folder: Path, head: Published) -> Path:
    """A folder with the head's config and a safetensors file of full size whose weights are a hole in the file."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(head.config_json()))
    mappings = {"d2t": ("I64", 8, (head.vocab,)), "t2d": ("BOOL", 1, (head.vocab,))}
    header: dict[str, object] = {}
    end = 0
    for name, (dtype, width, shape) in {**{n: ("BF16", 2, s) for n, s in head.shapes().items()}, **mappings}.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + width * prod(shape)]}
        end += width * prod(shape)
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def tiny(name: str) -> Published:
    """The published head for `tiny_target`: its layers and K, small widths. 32 is vLLM's smallest head on a CPU."""
    return replace(
        HEADS[name], hidden=64, heads=4, kv_heads=2, head_dim=32, vocab=VOCAB, mask_token=MASK, max_length=512
    )


def write_tiny_target(folder: Path, name: str) -> Path:
    """A random target of the published head's architecture and number of layers, float32, that never says MASK."""
    head = tiny(name)
    sizes = COMMON | {
        "hidden_size": head.hidden,
        "head_dim": head.head_dim,
        "num_hidden_layers": head.target_layers,
        "intermediate_size": 32,
        "num_experts_per_tok": 2,
    }
    if name.startswith("gpt-oss"):  # sinks, and a window on every other layer that is shorter than the prompts
        rope = {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
        config = GptOssConfig(**sizes, num_local_experts=4, sliding_window=16, rope_parameters=rope)
        model: Any = GptOssForCausalLM(config)
    else:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, num_experts=4, moe_intermediate_size=32, norm_topk_prob=True)
        )
    randomise(model, seed=head.target_layers)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "o_proj" in parameter_name or "down_proj" in parameter_name:
                # as initialised for training: all layers together weigh as much as the embeddings, so that a head of
                # four layers can learn something of dozens
                parameter.mul_((2 * head.target_layers) ** -0.5)
        model.lm_head.weight[MASK:].zero_()
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


PROMPTS = ("What is a lighthouse for?", "Name three rivers.", "abc abc abc abc", "def add(a, b):", "1 + 1 = ")


def write_prompts(path: Path) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in PROMPTS))
    return path


def train_head(folder: Path, target: Path, name: str, *more: object, steps: int, max_tokens: int = 32) -> Path:
    """`peagle data generate`, then `peagle train` on those answers; the head of the published layout unless `more`."""
    answers = folder / "answers"
    if not answers.is_dir():
        prompts = write_prompts(folder / "prompts.jsonl")
        call(
            "data", "generate", target, "-o", answers, "--prompts", prompts, "--max-tokens", max_tokens,
            "--loop-limit", 0, "--device", "cpu", "--dtype", "float32",
        )  # fmt: skip
    run = folder / f"run-{len(list(folder.glob('run-*')))}"
    head = tiny(name)
    layout: Sequence[object] = more or (
        "--kind", "p-eagle", "--layers", LAYERS, "--k-train", head.k_train, "--mask-token-id", MASK, "--keep-rate", 1,
        "--intermediate-size", 4 * head.hidden, "--train-embeddings", "--train-lm-head",
    )  # fmt: skip
    call(
        "train", target, answers, "-o", run, *layout, "--max-steps", steps, "--optimizer", "muon", "--lr", "3e-2",
        "--pack-length", 512, "--packs-per-step", 1, "--device", "cpu", "--no-tensorboard",
    )  # fmt: skip
    return run / "head"


def as_published(head: Path, output: Path, sizes: Published) -> Path:
    """A trained head as those of AWS stand on the Hub: their keys only, and mappings of every id to itself."""
    output.mkdir()
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
    tensors["t2d"] = torch.ones(VOCAB, dtype=torch.bool)
    save_file(tensors, output / "model.safetensors")
    trained = json.loads((head / "config.json").read_text())
    rope = {key: trained[key] for key in ("rope_theta", "rope_scaling") if key in trained}
    raw = {**sizes.config_json(), "rms_norm_eps": trained["rms_norm_eps"], "rope_scaling": None} | rope
    (output / "config.json").write_text(json.dumps(raw))
    return output


def call(*arguments: object) -> str:
    """`peagle ARGUMENTS` in this process, which has to succeed; what it printed."""
    result = run_peagle(*arguments)
    assert result.exit_code == 0, f"{result.output}\n{result.exception!r}"
    return str(result.stdout)
