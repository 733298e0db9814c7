"""`config.json` from one layout to the other and back: what no reader knows is kept, what somebody changed is too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from peagle.drafter import load_drafter, save_drafter
from peagle.drafter.config_keys import Layout
from peagle.drafter.convert import SOURCE, convert_head
from peagle.drafter.facts import read_head_facts
from tests.drafter.heads import HIDDEN, VOCAB, edit_config, make_drafter

OTHER: dict[Layout, Layout] = {"native": "speculators", "speculators": "native"}
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
}
LLAMA = {
    "model_type": "llama",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "mlp_bias": False,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    **SIZES,
}
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
P_EAGLE: dict[str, Any] = {"num_hidden_layers": 4, "own_embed_tokens": True, "own_lm_head": True}
EAGLE3: dict[str, Any] = {"kind": "eagle3", "draft_vocab_size": 20, "own_lm_head": True}


def speculators(kind: str, tokens: int, **more: Any) -> dict[str, Any]:
    """As the speculators project writes it, its training keys included."""
    method = {
        "proposal_type": "greedy", "speculative_tokens": tokens, "verifier_accept_k": 1, "accept_tolerance": 0.0
    }  # fmt: skip
    layer = LLAMA | {"num_hidden_layers": 1, "rope_theta": 500000, "rope_scaling": None, "max_position_embeddings": 512}
    return {
        "architectures": ["PEagleSpeculator" if kind == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.4.1",
        "transformer_layer_config": layer | {"_name_or_path": "", "chunk_size_feed_forward": 0},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "embed_requires_grad": kind == "peagle",
        "has_no_defaults_at_init": False,
        "target_hidden_size": None,
        "transformers_version": "4.57.1",
        "dtype": "bfloat16",
        **more,
    }


# how heads stand on the Hub: (what a drafter is made of, its config.json)
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "native, as amazon/gpt-oss-20b-p-eagle": (
        P_EAGLE,
        LLAMA
        | {
            "architectures": ["LlamaForCausalLMEagle3"],
            "num_hidden_layers": 4,
            "draft_vocab_size": VOCAB,
            "parallel_drafting": True,
            "ptd_token_id": 58,
            "rope_theta": 150000,
            "rope_scaling": YARN,
            "max_position_embeddings": 131072,
            "torch_dtype": "bfloat16",
            "fc_norm": False,
        },
    ),
    "native, settings nested": (
        {**EAGLE3, "norm_before_fc": True},
        LLAMA
        | {
            "architectures": ["Eagle3LlamaForCausalLM"],
            "num_hidden_layers": 1,
            "draft_vocab_size": 20,
            "max_position_embeddings": 512,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
                "norm_before_fc": True,
                "use_aux_hidden_state": True,
            },
            "peagle": {"k_train": 4, "recipe": {"steps": 100}},
        },
    ),
    "native, another name of the mask token": (
        {},
        LLAMA
        | {
            "architectures": ["PEagleDraftModel"],
            "num_hidden_layers": 1,
            "mask_token_id": 59,
            "max_position_embeddings": 512,
        },
    ),
    "speculators P-EAGLE": (
        {},
        speculators(
            "peagle", 8, mask_token_id=59, norm_before_residual=False, draft_vocab_size=VOCAB, num_depths=8,
            down_sample_ratio=0.7, loss_config={"x": 1}, max_seq_len=4096,
        ),
    ),
    "speculators EAGLE-3": (EAGLE3, speculators("eagle3", 3, draft_vocab_size=20, norm_before_fc=False)),
}  # fmt: skip


def content(folder: Path) -> str:
    """config.json, so that 1 and 1.0 differ and the order of keys does not matter."""
    return json.dumps(json.loads((folder / "config.json").read_text()), sort_keys=True)


def put(folder: Path, name: str) -> Path:
    """A head in the layout of its config, with that config."""
    made_of, config = PUBLISHED[name]
    save_drafter(make_drafter(**made_of), folder, "native" if name.startswith("native") else "speculators")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_config_comes_back_as_it_was(tmp_path, name):
    start = put(tmp_path / "start", name)
    layout = read_head_facts(start).layout
    assert layout is not None
    there = convert_head(start, tmp_path / "there", OTHER[layout])
    assert read_head_facts(there).problems == []
    assert load_drafter(there).config == load_drafter(start).config
    assert read_head_facts(there).target_name == read_head_facts(start).target_name
    back = convert_head(there, tmp_path / "back", layout)
    assert content(back) == content(start)
    assert content(convert_head(back, tmp_path / "again", OTHER[layout])) == content(there)
    for head in (start, there):  # the layout that it has
        same = convert_head(head, tmp_path / f"same-{head.name}", read_head_facts(head).layout)
        assert content(same) == content(head)


@pytest.mark.parametrize("name", PUBLISHED)
def test_beside_the_source_stands_what_a_head_of_ours_has(tmp_path, name):
    """So readers of either layout find the keys that they know, and none in the place of another."""
    start = put(tmp_path / "start", name)
    facts = read_head_facts(start)
    assert facts.layout is not None
    there = json.loads(content(convert_head(start, tmp_path / "there", OTHER[facts.layout])))
    assert there.pop(SOURCE) == PUBLISHED[name][1]
    ours = save_drafter(load_drafter(start), tmp_path / "ours", OTHER[facts.layout], facts.target_name)
    assert there == json.loads(content(ours))


@pytest.mark.parametrize("layout", OTHER)
@pytest.mark.parametrize("made_of", [P_EAGLE, EAGLE3, {"k_train": None}], ids=str)
def test_heads_of_ours_need_no_source(tmp_path, made_of, layout):
    start = save_drafter(make_drafter(**made_of), tmp_path / "start", layout, "owner/target")
    there = convert_head(start, tmp_path / "there", OTHER[layout])
    assert SOURCE not in content(there)
    assert content(convert_head(there, tmp_path / "back", layout)) == content(start)


def test_what_was_changed_in_between_is_kept(tmp_path):
    name = "native, as amazon/gpt-oss-20b-p-eagle"
    start = put(tmp_path / "start", name)
    there = convert_head(start, tmp_path / "there", "speculators")
    layer = json.loads(content(there))["transformer_layer_config"] | {"max_position_embeddings": 4096}
    edit_config(there, transformer_layer_config=layer, eagle_aux_hidden_state_layer_ids=[1, 2, 3], note="mine")
    back = convert_head(there, tmp_path / "back", "native")
    found = json.loads(content(back))
    edited = json.loads(content(there))
    assert found.pop(SOURCE) == edited  # it holds the note
    new = {"max_position_embeddings": 4096, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    assert found == PUBLISHED[name][1] | new
    assert content(convert_head(back, tmp_path / "again", "speculators")) == content(there)


def test_a_change_that_another_key_would_hide_is_kept(tmp_path):
    """In the native layout mask_token_id comes before ptd_token_id."""
    there = convert_head(
        put(tmp_path / "start", "native, another name of the mask token"), tmp_path / "there", "speculators"
    )
    edit_config(there, mask_token_id=57)
    back = convert_head(there, tmp_path / "back", "native")
    assert load_drafter(back).config.mask_token_id == 57
    assert content(convert_head(back, tmp_path / "again", "speculators")) == content(there)


@pytest.mark.parametrize("source", ["text", {}, {"architectures": ["LlamaForCausalLMEagle3"]}, {"architectures": 1}])
def test_a_source_that_is_no_config_changes_nothing(tmp_path, source):
    start = save_drafter(make_drafter(), tmp_path / "start", "speculators")
    expected = convert_head(start, tmp_path / "expected", "native")
    edit_config(start, **{SOURCE: source})
    found = json.loads(content(convert_head(start, tmp_path / "there", "native")))
    assert found.pop(SOURCE)[SOURCE] == source
    assert found == json.loads(content(expected))


def test_an_unknown_depth_is_not_invented(tmp_path):
    there = convert_head(
        put(tmp_path / "start", "native, as amazon/gpt-oss-20b-p-eagle"), tmp_path / "there", "speculators"
    )
    assert json.loads(content(there))["speculators_config"]["proposal_methods"] == [{"proposal_type": "greedy"}]
    edit_config(there, peagle=None)  # by the methods alone
    assert load_drafter(there).config.k_train is None
