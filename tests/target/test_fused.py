"""A fused decoder gives what the model's own does, over the paged cache and densely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.engine.loading import prepare_for_inference
from peagle.kernels.half_linear import HalfLinear, has_half
from peagle.kernels.joined_linear import JoinedPart
from peagle.kernels.packed_linear import PackedLinear, can_pack
from peagle.kernels.rotary_table import RotaryTable, can_tabulate
from peagle.target import Target, load_target
from peagle.target.fused import fuse_decoder_layers
from tests.conftest import COMMON, WINDOW, make_model, randomise
from tests.target.paging import Paged, Rows, dense

AUX = (0, 3, 6)


def model_of(family: str) -> torch.nn.Module:
    if family in ("llama", "qwen3"):
        return make_model(family)
    if family == "qwen2":  # biases
        return Qwen2ForCausalLM(Qwen2Config(**COMMON))
    if family == "llama-bias":
        return LlamaForCausalLM(LlamaConfig(**COMMON, attention_bias=True))
    return MistralForCausalLM(MistralConfig(**COMMON, sliding_window=WINDOW))


@pytest.mark.parametrize("layout", ["as on a GPU", "float32", "float16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "qwen2", "llama-bias", "mistral"])
def test_equals_the_models_own(family: str, layout: str) -> None:
    """With weights in every layout that a CPU gives them too; alone, with drafts, and among other requests."""
    model = model_of(family)
    randomise(model, 3)
    if layout == "float16":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half())
    target = Target(model, None, family)
    tokens = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    before, aux_before = dense(target, tokens, AUX)
    if layout == "as on a GPU":
        assert fuse_decoder_layers(target) == 7
    else:
        prepare_for_inference(target)
        prepare_for_inference(target)
        wanted = HalfLinear if layout == "float16" and has_half() else PackedLinear
        assert sum(type(m) is wanted for m in target.model.modules()) == (7 * 4 + 1 if can_pack() else 0)
    assert target.fused is not None
    assert fuse_decoder_layers(target) == 0
    after, aux_after = dense(target, tokens, AUX)
    torch.testing.assert_close(after, before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(aux_after, aux_before, atol=1e-4, rtol=1e-4)
    paged = Paged(target, 2, 40, 4)
    got = []
    for start, end in ((0, 11), (11, 12), (12, 16), (16, 30)):
        others = [Rows(1, 0, tokens[:end])] if start else []
        got.append(paged.run([*others, Rows(0, start, tokens[start:end])], AUX)[-1])
    torch.testing.assert_close(torch.cat([g for g, _ in got]), before, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(torch.cat([a for _, a in got if a is not None]), aux_before, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3", "gemma2", "qwen3_moe"])
def test_others_are_left_alone(target_folder: Callable[[str], Path], architecture: str) -> None:
    target = load_target(str(target_folder(architecture)), device="cpu")
    assert fuse_decoder_layers(target) == 0
    assert target.fused is None


@pytest.mark.parametrize("architecture", ["gpt_oss", "gemma3", "gemma2", "qwen3_moe"])
def test_others_keep_their_layers_on_a_cpu(target_folder: Callable[[str], Path], architecture: str) -> None:
    target = load_target(str(target_folder(architecture)), device="cpu")
    prepare_for_inference(target)
    assert target.fused is None
    assert not any(isinstance(m, JoinedPart) for m in target.model.modules())


def test_can_be_saved(target_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Joined weights are written as the model's own."""
    target = load_target(str(target_folder("llama")), device="cpu")
    expected = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    fuse_decoder_layers(target)
    target.model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_rotary_table() -> None:
    """The same numbers, for a RoPE type with scaling too; types that look at the text's length are left alone."""
    for parameters, fixed in (
        ({"rope_type": "default", "rope_theta": 10000.0}, True),
        ({"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}, True),
        ({"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}, False),
    ):  # fmt: skip
        rotary = LlamaRotaryEmbedding(LlamaConfig(**COMMON, rope_parameters=parameters))
        assert can_tabulate(rotary) is fixed
        if fixed:
            x, positions = torch.zeros(1, dtype=torch.bfloat16), torch.tensor([[0, 1, 7, 499]])
            for ours, expected in zip(RotaryTable(rotary, 512, x)(x, positions), rotary(x, positions), strict=True):
                assert torch.equal(ours, expected)
