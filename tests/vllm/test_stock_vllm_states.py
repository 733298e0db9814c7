"""Hidden states from stock vLLM on the CPU, by the connector that runs inside it: those of the target in the process.

VLLM_PYTHON names the Python of an environment with vLLM; without it this is skipped.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.target.loading import load_target
from peagle.training.write_states import target_encoder
from peagle.vllm.states import VllmStates
from tests.conftest import COMMON, MASK, make_tokenizer, randomise
from tests.vllm.test_stock_vllm_answers import CPU

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="needs stock vLLM: set VLLM_PYTHON to the Python of its environment"),
]
LAYERS = (0, 2, 4)  # 0: the embeddings


def write_target(folder: Path) -> Path:
    """A random Llama, float32. 32 is vLLM's smallest head on a CPU."""
    model = LlamaForCausalLM(LlamaConfig(**COMMON | {"hidden_size": 64, "head_dim": 32}, tie_word_embeddings=False))
    randomise(model, seed=6)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def row_errors(found: Tensor, exact: Tensor) -> Tensor:
    """Relative error of each row."""
    return (found.float() - exact).norm(dim=-1) / exact.norm(dim=-1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_vllm_gives_the_states_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """As near to those in float32 as the target itself is in the same dtype.

    Two calls of documents of 1 to 300 tokens: less than a block of the cache and several, and blocks used again.
    """
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    folder = str(write_target(tmp_path / "target"))
    target = load_target(folder, dtype, "cpu")
    documents = [np.random.default_rng(n).integers(0, MASK, n) for n in (1, 15, 16, 17, 130, 300)]
    exact = target_encoder(load_target(folder, "float32", "cpu"), LAYERS)(documents)
    here = target_encoder(target, LAYERS)(documents)
    assert PYTHON is not None
    with VllmStates(PYTHON, dtype).encoder(target, LAYERS, 300) as encode:
        for _ in range(2):
            for name, found, ours, right in zip(("aux", "hidden"), encode(documents), here, exact, strict=True):
                assert found.dtype == ours.dtype == getattr(torch, dtype)
                assert found.shape == ours.shape
                error, own = row_errors(found, right), row_errors(ours, right)
                print(f"{dtype} {name}: rows' error up to {error.max():.1e}, mean {error.mean():.1e}; {own.mean():.1e}")
                assert error.max() < max(1e-4, 3 * own.max())
                assert error.mean() < max(1e-5, 1.5 * own.mean())
