"""Which tensor names stock vLLM takes: `test_stock_vllm_names.py` asks vLLM itself."""

import json
from pathlib import Path

import pytest
import torch

from peagle.drafter.facts import read_head_facts
from peagle.drafter.saving import save_drafter
from peagle.vllm.needs import vllm_problems
from tests.cli.conftest import run_peagle
from tests.drafter.heads import edit_tensors, make_drafter
from tests.vllm.test_serve import make_head


@pytest.fixture(params=["p-eagle", "eagle3"])
def head(request, tmp_path):
    drafter = make_drafter(
        kind=request.param, num_hidden_layers=2, draft_vocab_size=20, own_embed_tokens=True, own_lm_head=True
    )
    return save_drafter(drafter, tmp_path / "head")


def prefix(folder, *names):
    """Put `model.` before the names, or before all."""
    edit_tensors(
        folder, lambda tensors: [tensors.update({f"model.{n}": tensors.pop(n)}) for n in names or list(tensors)]
    )


def test_names_of_both_layouts(tmp_path, head):
    assert vllm_problems(read_head_facts(head)) == []
    assert vllm_problems(read_head_facts(save_drafter(make_drafter(), tmp_path / "other", "speculators"))) == []


@pytest.mark.parametrize(
    "name", ["fc.weight", "midlayer.hidden_norm.weight", "lm_head.weight", "embed_tokens.weight", "d2t"]
)
def test_a_prefix_that_vllm_puts_there_itself(head, name):
    prefix(head, name)
    facts = read_head_facts(head)
    assert facts.problems == []  # our own loader takes it
    (problem,) = vllm_problems(facts)
    assert problem == (
        f"model.{name}: vLLM fails at start, expected tensor names without 'model.' before them; convert the head: "
        "peagle convert HEAD OUTPUT --layout native"
    )


def test_names_that_vllm_takes_with_a_prefix_too(head):
    edit_tensors(head, lambda tensors: tensors.update({"layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    names = ["t2d", "layers.1.self_attn.rotary_emb.inv_freq"]
    if read_head_facts(head).config.kind == "p-eagle":
        names.append("mask_hidden")
    prefix(head, *names)
    facts = read_head_facts(head)
    assert (facts.problems, vllm_problems(facts)) == ([], [])


@pytest.mark.parametrize("before", ["", "model."])
def test_tensors_that_vllm_has_no_place_for(head, before):
    """Those that some makers leave in: converting keeps them, so that is no help."""
    names = [before + name for name in ("verifier_lm_head.weight", "verifier_norm.weight")]
    edit_tensors(head, lambda tensors: tensors.update({name: torch.ones(4) for name in names}))
    facts = read_head_facts(head)
    assert facts.problems == []
    assert vllm_problems(facts) == [
        f"{names[0]} and 1 more: vLLM fails at start, expected a head without these tensors"
    ]


def test_serving_is_refused_and_converting_mends_it(target_folder, tmp_path):
    head = Path(make_head(tmp_path / "head"))
    prefix(head)
    command = ["serve", target_folder("llama"), "--engine", "vllm", "--dry-run", "--speculative-config"]
    refused = run_peagle(*command, json.dumps({"model": str(head), "num_speculative_tokens": 3}))
    assert refused.exit_code == 2
    assert "model.fc.weight and 11 more: vLLM fails at start" in refused.stderr
    assert "peagle convert HEAD OUTPUT --layout native" in refused.stderr
    assert run_peagle("convert", head, tmp_path / "mended", "--layout", "native").exit_code == 0
    taken = run_peagle(*command, json.dumps({"model": str(tmp_path / "mended"), "num_speculative_tokens": 3}))
    assert taken.exit_code == 0, taken.output
