"""Shared fixtures: tiny random targets of several architectures, each written to a folder once per session.

Nothing here reaches the network, and PyTorch runs on one thread, so that several test runs may share a machine.
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: its own library obeys it too

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from peagle.target import Target, load_target

ARCHITECTURES = ("llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3", "gemma2")
VOCAB = 320  # the tokenizer below fills 0..258, so some ids never occur in text
EOS, MASK = 257, 300
WINDOW = 8  # sliding window of gpt-oss and Gemma, much shorter than the tests' contexts

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 7,  # the smallest depth at which (2, n/2, n-3) are three different layers in order
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": 258,
}

CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, then <|start|> (256), <|end|> (257, ends answers) and <|pad|> (258)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>", "<|pad|>"])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|start|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def make_model(architecture: str) -> PreTrainedModel:
    """A random model of one architecture, in float32."""
    if architecture == "llama":
        return LlamaForCausalLM(LlamaConfig(**COMMON, tie_word_embeddings=False))
    if architecture == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**COMMON, tie_word_embeddings=True))
    if architecture == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **experts, mlp_only_layers=[1]))
    if architecture == "gpt_oss":
        rope = {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        }
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}
        return GptOssForCausalLM(GptOssConfig(**COMMON, **experts, rope_parameters=rope))
    if architecture == "gemma3":
        sizes = {**COMMON, "head_dim": 16}  # not hidden_size / heads
        extra = {"sliding_window": WINDOW, "sliding_window_pattern": 3, "query_pre_attn_scalar": 24}
        return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **extra, final_logit_softcapping=5.0))
    if architecture == "gemma2":  # the one with a soft cap on its attention scores
        extra = {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "layer_types": None}
        return Gemma2ForCausalLM(
            Gemma2Config(**COMMON, **extra, final_logit_softcapping=5.0, attn_logit_softcapping=2.0)
        )
    raise AssertionError(architecture)


@torch.no_grad()
def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that every norm, sink, bias and attention score shows in the logits.

    (The usual initialisation makes attention nearly uniform, which hides wrong masks.)
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1 and "norm" in name:
            parameter.add_(0.3 * noise)
        elif parameter.dim() == 1 or "embed" in name:  # biases and sinks
            parameter.copy_(noise)
        else:
            parameter.copy_(1.5 * noise / parameter.shape[-1] ** 0.5)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """target_folder("llama") -> a folder with the model (float32) and its tokenizer, made when first asked for."""
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            path = tmp_path_factory.mktemp("targets") / architecture
            model = make_model(architecture)
            randomise(model, seed=ARCHITECTURES.index(architecture))
            model.save_pretrained(path)
            make_tokenizer().save_pretrained(path)
            made[architecture] = path
        return made[architecture]

    return folder


@pytest.fixture(scope="session")
def tiny_target(target_folder: Callable[[str], Path]) -> Callable[[str], Target]:
    """tiny_target("llama") -> the loaded target, float32 on the CPU, shared by the session: do not change it."""
    loaded: dict[str, Target] = {}

    def target(architecture: str) -> Target:
        if architecture not in loaded:
            loaded[architecture] = load_target(str(target_folder(architecture)), device="cpu")
        return loaded[architecture]

    return target


@pytest.fixture(params=ARCHITECTURES)
def any_target(request: pytest.FixtureRequest, tiny_target: Callable[[str], Target]) -> Target:
    """Each of the architectures in turn."""
    return tiny_target(request.param)
