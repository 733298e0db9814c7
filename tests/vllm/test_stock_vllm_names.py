"""The tensor names that stock vLLM takes are those that `peagle inspect` says it takes.

VLLM_PYTHON names the Python of an environment with vLLM; without it this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from peagle.drafter import save_drafter
from peagle.vllm.needs import name_problems
from tests.conftest import VOCAB
from tests.drafter.heads import make_drafter
from tests.vllm.published import HEADS, tiny, write_tiny_target
from tests.vllm.test_stock_vllm_answers import CPU

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PYTHON is None, reason="needs stock vLLM: set VLLM_PYTHON to the Python of its environment"),
]
# In the place where vLLM loads a drafter: its loader is given the head under other names, time after time.
ASK = """
import json, os, sys
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
import torch, vllm
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM as Model
target, head, parallel, cases = sys.argv[1], sys.argv[2], sys.argv[3] == "p-eagle", json.loads(sys.argv[4])
load = Model.load_weights
def ask(model, weights):
    tensors, said = dict(weights), []
    for names, more in cases:
        given = [(names.get(name, name), tensor) for name, tensor in tensors.items()]
        try:
            load(model, iter([*given, *((name, torch.ones(4)) for name in more)]))
            said.append("")
        except (ValueError, KeyError) as error:
            said.append(str(error))
    print("said", json.dumps(said), flush=True)
    os._exit(0)
Model.load_weights = ask
if __name__ == "__main__":
    settings = {"method": "eagle3", "model": head, "num_speculative_tokens": 3, "parallel_drafting": parallel}
    vllm.LLM(target, dtype="float32", enforce_eager=True, max_model_len=256, speculative_config=settings)
"""


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_every_name_with_a_prefix_and_without(tmp_path: Path, kind: str) -> None:
    published = "qwen3-coder-30b"
    target, sizes = write_tiny_target(tmp_path / "target", published), tiny(published)
    drafter = make_drafter(
        kind=kind, num_hidden_layers=2, hidden_size=sizes.hidden, num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads, head_dim=sizes.head_dim, vocab_size=VOCAB, draft_vocab_size=20,
        aux_hidden_state_layer_ids=HEADS[published].aux, own_embed_tokens=True, own_lm_head=True, fc_norm=True,
    )  # fmt: skip
    head = save_drafter(drafter, tmp_path / "head")
    names = list(load_file(head / "model.safetensors"))
    cases: list[tuple[dict[str, str], list[str]]] = [({}, []), ({name: "model." + name for name in names}, [])]
    cases.append(({name: name.replace("midlayer.", "layers.0.") for name in names}, []))
    cases += [({name: "model." + name}, []) for name in names]
    foreign = ("verifier_norm.weight", "verifier_lm_head.weight", "layers.1.self_attn.rotary_emb.inv_freq")
    cases += [({}, [before + name]) for name in foreign for before in ("", "model.")]

    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | CPU  # its environment, not ours
    script = tmp_path / "ask.py"
    script.write_text(ASK)
    command = [str(PYTHON), str(script), str(target), str(head), kind, json.dumps(cases)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("said ")] or [done.stderr]
    for (renamed, more), said in zip(cases, json.loads(line.removeprefix("said ")), strict=True):
        ours = name_problems([*(renamed.get(name, name) for name in names), *more])
        assert bool(said) == bool(ours), (renamed, more, said, ours)
