"""Heads in other makers' spellings."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.drafter import check_fits, load_drafter, save_drafter
from tests.drafter.heads import (
    HIDDEN,
    VOCAB,
    edit_config,
    edit_tensors,
    make_drafter,
)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"rope_parameters": None, "rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}),
        ({"rope_parameters": None, "rope_theta": None}, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"rope_parameters": None, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 8.0},
            {"rope_type": "default", "rope_theta": 7.0},
        ),
        (
            {"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
    ],
)
def test_both_generations_of_rope_keys(head, keys, expected):
    edit_config(head, **{"rope_scaling": None, **keys})
    assert load_drafter(head).config.rope_parameters == expected


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_spellings_of_the_first_layer(tmp_path, head, prefix, layer):
    def respell(tensors):
        for name in list(tensors):
            tensors[prefix + name.replace("midlayer.", layer)] = tensors.pop(name)

    reference = load_drafter(head).state_dict()
    edit_tensors(head, respell)
    loaded = load_drafter(head).state_dict()
    assert set(loaded) == set(reference)
    assert all(torch.equal(loaded[n], reference[n]) for n in loaded)


def test_published_p_eagle_layout(tmp_path):
    """amazon/gpt-oss-20b-p-eagle scaled down: four layers, everything its own, `ptd_token_id`, old RoPE keys."""
    drafter = make_drafter(num_hidden_layers=4, own_embed_tokens=True, own_lm_head=True, max_position_embeddings=131072)
    folder = tmp_path / "published"
    folder.mkdir()
    tensors = {name.replace("layers.0.", "midlayer."): t.bfloat16() for name, t in drafter.state_dict().items()}
    for layer in (1, 2, 3):
        # every layer of theirs has one, only the first reads it
        tensors[f"layers.{layer}.hidden_norm.weight"] = torch.ones(HIDDEN).bfloat16()
    tensors["midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "parallel_drafting": True,
        "ptd_token_id": 58,
        "eagle_aux_hidden_state_layer_ids": [2, 12, 21],
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    loaded = load_drafter(folder, kind="p-eagle", dtype=torch.float32)
    assert loaded.config.num_hidden_layers == 4
    assert loaded.config.mask_token_id == 58
    assert loaded.config.rope_parameters["rope_type"] == "yarn"
    assert loaded.config.rope_parameters["rope_theta"] == 150000
    assert loaded.config.own_embed_tokens
    assert loaded.config.own_lm_head
    assert loaded.bound
    assert not loaded.config.norm_before_residual
    check_fits(loaded.config, vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=24)
    assert loaded.mask_state().shape == (HIDDEN,)


@pytest.mark.parametrize(("kind", "default"), [("p-eagle", False), ("eagle3", True)])
def test_speculators_defaults_of_norm_before_residual(tmp_path, kind, default):
    folder = save_drafter(make_drafter(kind=kind), tmp_path / "head", "speculators")
    edit_config(folder, norm_before_residual=None)
    assert load_drafter(folder).config.norm_before_residual is default
    native = save_drafter(make_drafter(kind=kind, norm_before_residual=True), tmp_path / "native")
    edit_config(native, norm_before_residual=None)
    assert load_drafter(native).config.norm_before_residual is False


def test_speculators_checkpoint_of_another_maker(tmp_path):
    """Without this package's own keys, with the verifier's tensors that training needed."""
    drafter = make_drafter(kind="eagle3", draft_vocab_size=20, own_lm_head=True, norm_before_residual=True)
    folder = save_drafter(drafter, tmp_path / "head", "speculators")
    edit_config(folder, peagle=None, norm_before_residual=None, dtype=None, fc_norm=None, norm_output=None)
    edit_tensors(
        folder,
        lambda t: t.update(
            {"verifier_lm_head.weight": torch.zeros(4, HIDDEN), "verifier_norm.weight": torch.zeros(HIDDEN)}
        ),
    )
    loaded = load_drafter(folder, kind="eagle3")
    assert replace(loaded.config, k_train=8) == drafter.config
    assert torch.equal(loaded.d2t, drafter.d2t)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"ptd_token_id": 7}, 7),
        ({"ptd_token_id": None, "pard_token": 8}, 8),
        ({"ptd_token_id": 7, "pard_token": 8, "mask_token_id": 9}, 9),  # vLLM's order
        ({"ptd_token_id": None, "mask_token_id": 0}, 0),
    ],
)
def test_names_of_the_mask_token(head, keys, expected):
    edit_config(head, parallel_drafting=None, **keys)
    loaded = load_drafter(head, kind="p-eagle")
    assert loaded.config.mask_token_id == expected


def test_settings_inside_eagle_config(tmp_path):
    folder = save_drafter(make_drafter(kind="eagle3", norm_before_fc=True), tmp_path / "head")
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "norm_before_fc": True, "use_aux_hidden_state": True}
    edit_config(folder, eagle_aux_hidden_state_layer_ids=None, norm_before_fc=None, eagle_config=nested)
    config = load_drafter(folder).config
    assert config.aux_hidden_state_layer_ids == (1, 2, 4)
    assert config.norm_before_fc


@pytest.mark.parametrize("shape", [(96,), (1, 96), (1, 1, 96)])
def test_shapes_of_mask_hidden(head, shape):
    edit_tensors(head, lambda t: t.update(mask_hidden=t["mask_hidden"].reshape(shape)))
    assert load_drafter(head).mask_hidden.shape == (1, 1, 96)


def test_bias_without_one_on_o_proj(tmp_path):
    folder = save_drafter(make_drafter(attention_bias=True), tmp_path / "head")
    edit_tensors(folder, lambda t: t.pop("midlayer.self_attn.o_proj.bias"))
    assert not load_drafter(folder).layers[0].self_attn.o_proj.bias.any()


def test_identity_mapping_of_the_whole_vocabulary_is_ignored(head):
    edit_tensors(head, lambda t: t.update(d2t=torch.zeros(VOCAB, dtype=torch.int64)))
    assert load_drafter(head).d2t is None


def test_sharded_tensors(head):
    tensors = load_file(head / "model.safetensors")
    (head / "model.safetensors").unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[::2], names[1::2])):
        save_file({name: tensors[name] for name in part}, head / f"model-0000{i + 1}-of-00002.safetensors")
    loaded = load_drafter(head)
    save_drafter(loaded, head)
    assert sorted(f.name for f in head.iterdir()) == ["config.json", "model.safetensors"]
    assert set(load_file(head / "model.safetensors")) == set(names)
