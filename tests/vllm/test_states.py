"""Hidden states by vLLM, which a small package of the same names stands for: its process, its files, its failures."""

from __future__ import annotations

import os
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peagle.errors import InputError
from peagle.training.write_states import plan_states, target_encoder, write_states
from peagle.vllm.states import VllmStates
from tests.training.helpers import listed_answers, tiny_target

LAYERS = (0, 1, 3)
FAKE = """
import json, os, torch
from safetensors.torch import save_file

class SamplingParams:
    def __init__(self, **_): pass

class Output:
    def __init__(self, path): self.kv_transfer_params = {"hidden_states_path": path}

class LLM:
    def __init__(self, model, **settings):
        if settings.get("fail"):
            raise SystemExit("no room for the cache")
        from transformers import AutoModelForCausalLM
        spec = settings["speculative_config"]
        self.layers = spec["draft_model_config"]["hf_config"]["eagle_aux_hidden_state_layer_ids"]
        self.folder = settings["kv_transfer_config"]["kv_connector_extra_config"]["shared_storage_path"]
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        assert settings["max_model_len"] == 41 and not settings["enable_prefix_caching"]
        os.makedirs(self.folder)

    @torch.no_grad()
    def generate(self, prompts, params, use_tqdm):
        outputs = []
        for number, prompt in enumerate(prompts):
            states = self.model(torch.tensor([prompt["prompt_token_ids"]]), output_hidden_states=True)
            path = os.path.join(self.folder, f"{number}.safetensors")
            # the last of Transformers' states is normed, vLLM's is not: undone by an identity norm in the test
            found = torch.stack([states.hidden_states[i][0] for i in self.layers], 1).bfloat16()
            save_file({"hidden_states": found.contiguous()}, path)
            open(path + ".lock", "w").close()
            outputs.append(Output(path))
        return outputs
"""


@pytest.fixture
def python(tmp_path: Path) -> str:
    """An interpreter with a package that is called vllm."""
    site = tmp_path / "site"
    method = site / "vllm" / "v1" / "spec_decode"
    method.mkdir(parents=True)
    (method / "extract_hidden_states.py").touch()
    (site / "vllm" / "__init__.py").write_text(FAKE)
    (site / "vllm" / "platforms.py").write_text("class current_platform:\n    is_cpu = staticmethod(lambda: True)\n")
    (site / "vllm-1.2.3.dist-info").mkdir()
    (site / "vllm-1.2.3.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.2.3\n")
    script = tmp_path / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{site}:$PYTHONPATH" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


class Unnormed(torch.nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def target_of(folder: Path) -> Any:
    target = tiny_target()
    target.model.save_pretrained(folder)
    target.name_or_path = str(folder)
    target.model.to(torch.bfloat16)
    return target


def test_states_come_from_vllm(tmp_path: Path, python: str) -> None:
    target, answers = target_of(tmp_path / "model"), listed_answers(12)
    vllm = VllmStates(python)
    assert vllm.version() == "1.2.3"
    documents = [example.input_ids for example in answers.examples[:5]]
    aux, hidden = target_encoder(target, LAYERS)(documents)
    target.decoder.norm = Unnormed()
    with vllm.encoder(target, LAYERS, 40) as encode:
        for _ in range(2):  # one process for many shards
            vllm_aux, vllm_hidden = encode(documents)
            torch.testing.assert_close(vllm_aux, aux, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(vllm_hidden, hidden, rtol=2e-2, atol=2e-2)
        plan = plan_states(target, answers, "bf16", LAYERS, computed_in=f"bfloat16 by vLLM {vllm.version()}")
        assert write_states(plan, answers, lambda: encode, tmp_path / "states", print) == 1
    # nobody else goes on with the folder
    plan = plan_states(target, answers, "bf16", LAYERS)
    with pytest.raises(InputError, match=r"computed_in: bfloat16 by vLLM 1\.2\.3 -> bfloat16"):
        write_states(plan, answers, lambda: target_encoder(target, LAYERS), tmp_path / "states", print)


def test_what_goes_wrong_is_said(tmp_path: Path, python: str) -> None:
    target = target_of(tmp_path / "model")
    with (
        pytest.raises(InputError, match="vllm: ended with status 1"),
        VllmStates(python, arguments={"fail": True}).encoder(target, LAYERS, 40),
    ):
        pass
    with VllmStates(python).encoder(target, LAYERS, 40) as encode, pytest.raises(InputError, match="vllm: ended"):
        encode([np.array([10**6])])  # no such token
    with pytest.raises(InputError, match=r"no/python does not run"):
        VllmStates("/no/python").version()
    os.remove(tmp_path / "site" / "vllm" / "v1" / "spec_decode" / "extract_hidden_states.py")
    with pytest.raises(InputError, match=r"vLLM 1\.2\.3 has no method extract_hidden_states"):
        VllmStates(python).version()
    bare = tmp_path / "bare"
    bare.write_text(textwrap.dedent(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n'))
    bare.chmod(0o755)
    with pytest.raises(InputError, match="vLLM is not installed for"):
        VllmStates(str(bare)).version()
