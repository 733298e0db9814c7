"""Models that the engine must not run: they would answer with words that are not theirs, or fail at the first one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    NemotronConfig,
    NemotronForCausalLM,
    PreTrainedModel,
    StableLmConfig,
    StableLmForCausalLM,
)

from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.target import load_target
from peagle.target.model import Target
from tests.conftest import COMMON

SMALL: dict[str, Any] = {key: COMMON[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "eos_token_id")}
ATTENTION: dict[str, Any] = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONVOLUTION = ["conv", "full_attention", *["conv"] * 5]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MambaForCausalLM(MambaConfig(**SMALL, state_size=4)), "Mamba.* has layers of type linear_attention"),
        (Lfm2ForCausalLM(Lfm2Config(**SMALL, **ATTENTION, layer_types=CONVOLUTION)), "Lfm2.* has layers of type conv"),
        (StableLmForCausalLM(StableLmConfig(**SMALL, **ATTENTION)), "StableLm.* does not use .*attention interface"),
    ],
    ids=["recurrent", "convolution", "own attention"],
)
def test_refused_by_the_engine(model: PreTrainedModel, message: str) -> None:
    target = Target(model, None, "tiny")  # for training from states that another engine computes it will do
    with pytest.raises(InputError, match=f"^model: {message}"):
        Engine(target)


@pytest.mark.parametrize("key", ["kv_lora_rank", "num_kv_shared_layers"])
def test_other_caches(target_folder: Callable[[str], Path], key: str) -> None:
    target = load_target(str(target_folder("llama")), device="cpu")
    target.check_paged()
    setattr(target.config, key, 2)
    with pytest.raises(InputError, match=rf"^model: LlamaForCausalLM has .*\({key}\)"):
        target.check_paged()


def test_layers_elsewhere() -> None:
    with pytest.raises(InputError, match=r"^model: GPT2LMHeadModel has no decoder with a list `layers`"):
        Target(GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=3, n_head=4, vocab_size=64)), None, "tiny")


def test_an_attention_that_gets_no_caches() -> None:
    engine = Engine(Target(NemotronForCausalLM(NemotronConfig(**SMALL, **ATTENTION)), None, "tiny"))
    engine.add_request("one", [1, 2, 3])
    with torch.inference_mode(), pytest.raises(InputError, match=r"^model: NemotronAttention does not hand on"):
        engine.step()
