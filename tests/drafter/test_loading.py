"""Everything that is refused at load, by key or tensor."""

import shutil

import pytest
import torch

from peagle.drafter import load_drafter, save_drafter
from peagle.errors import InputError
from tests.drafter.heads import (
    VOCAB,
    edit_config,
    edit_tensors,
    make_drafter,
)


def refused(folder, match, **arguments):
    with pytest.raises(InputError, match=match):
        load_drafter(folder, **arguments)


def test_no_folder(tmp_path):
    refused(tmp_path / "none", "is not a folder, expected a head's folder or a Hub id")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "is not a folder")
    refused("nobody-here/no-such-head", "no local folder and could not be had from the Hub")


def test_no_config_or_no_tensors(head, tmp_path):
    shutil.copytree(head, tmp_path / "a")
    (tmp_path / "a" / "config.json").unlink()
    refused(tmp_path / "a", "config.json is missing")
    (head / "model.safetensors").unlink()
    refused(head, r"no \*\.safetensors in")


@pytest.mark.parametrize("content", ['{"hidden_size": 3', "", "[1, 2]", '"text"', "\x00\xff"])
def test_damaged_config(head, content):
    (head / "config.json").write_bytes(content.encode("latin-1"))
    refused(head, r"config\.json (cannot be read as JSON|holds .*expected a JSON object)")


@pytest.mark.parametrize("size", [0, 4, 100, -1, -500])
def test_truncated_tensors(head, size):
    file = head / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    refused(head, "model.safetensors cannot be read, it may be truncated or damaged")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, r"architectures: got \['LlamaForCausalLM'\]"),
        ({"architectures": None}, r"architectures: got \[\]"),
        ({"model_type": "qwen3"}, "model_type: got 'qwen3', expected 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', expected 'silu'"),
        ({"hidden_size": None}, "hidden_size: missing, expected a positive integer"),
        ({"vocab_size": None}, "vocab_size: missing, expected a positive integer"),
        ({"hidden_size": "wide"}, "hidden_size: got 'wide', expected a positive integer"),
        ({"num_hidden_layers": [2]}, r"num_hidden_layers: got \[2\]"),
        ({"num_hidden_layers": True}, "num_hidden_layers: got True, expected a positive integer"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers: got 1000000000, expected a positive integer up to 1024"),
        ({"peagle": "text"}, "peagle: got 'text', expected an object"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "eagle_aux_hidden_state_layer_ids: got 5"),
        ({"eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": "3"}, "num_aux_hidden_states: got '3'"),
        ({"eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": 2}, r"(fc.weight|mask_hidden): shape .*"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 3, 2]}, r"got \[5, 3, 2\].*ascending"),
        ({"ptd_token_id": None}, "ptd_token_id: missing"),
        ({"ptd_token_id": 60}, "ptd_token_id: got 60, expected 0 to 59"),
        ({"ptd_token_id": "59"}, "ptd_token_id: got '59', expected the id of the mask token"),
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "rope_parameters: got .*spiral"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_parameters: got .*yarn"),
        ({"num_hidden_layers": 2}, "layers.1.*missing in .*expected shape"),
        ({"draft_vocab_size": 20}, "d2t: missing in .*because draft_vocab_size is 20"),
        ({"fc_norm": True}, "fc_norm.0.weight: missing"),
        ({"intermediate_size": 64}, r"gate_proj.weight: shape \[48, 32\], expected \[64, 32\]"),
        ({"target_hidden_size": 64}, r"(fc.weight|mask_hidden): shape .*, expected"),
    ],
)
def test_config_that_is_wrong_or_does_not_fit(head, changes, match):
    edit_config(head, **changes)
    refused(head, match)


def test_speculators_config_that_is_wrong(tmp_path):
    def saved():
        shutil.rmtree(tmp_path / "head", ignore_errors=True)
        return save_drafter(make_drafter(), tmp_path / "head", "speculators")

    edit_config(saved(), speculators_model_type="dflash")
    refused(tmp_path / "head", "speculators_model_type: got 'dflash', expected 'peagle' or 'eagle3'")
    edit_config(saved(), transformer_layer_config=None)
    refused(tmp_path / "head", "transformer_layer_config: missing")
    edit_config(saved(), mask_token_id=None)
    refused(tmp_path / "head", "mask_token_id: missing, expected the id of the mask token")
    edit_config(saved(), speculators_config=[1], peagle=None)
    refused(tmp_path / "head", r"speculators_config: got \[1\], expected an object")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.pop("mask_hidden"), "mask_hidden: missing in .*expected a tensor of 96 values"),
        (lambda t: t.update(mask_hidden=torch.zeros(1, 1, 32)), r"mask_hidden: shape .*, expected \[1, 1, 96\]"),
        (lambda t: t.pop("fc.weight"), "fc.weight: missing"),
        (lambda t: t.pop("midlayer.hidden_norm.weight"), "layers.0.hidden_norm.weight: missing"),
        (lambda t: t.update({"fc.weight": torch.zeros(32, 64)}), r"fc.weight: shape \[32, 64\], expected \[32, 96\]"),
        (lambda t: t.update({"embed_tokens.weight": torch.zeros(50, 32)}), "embed_tokens.weight: shape"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(20, 32)}), "lm_head.weight: shape"),
        (lambda t: t.update({"layers.1.mlp.up_proj.weight": torch.zeros(2)}), "layers.1.mlp.up_proj.*not a tensor"),
        (lambda t: t.update(d2t=torch.ones(VOCAB, dtype=torch.int64)), "d2t: maps to other ids, but draft_vocab_size"),
    ],
)  # fmt: skip
def test_tensors_that_are_missing_or_do_not_fit(head, change, match):
    edit_tensors(head, change)
    refused(head, match)


@pytest.mark.parametrize(
    ("offset", "match"),
    [
        (lambda d: d.index_fill(0, torch.tensor([4]), 56), r"d2t\[4\]: maps to target id 60, expected 0 to 59"),
        (lambda d: d.index_fill(0, torch.tensor([3]), -4), r"d2t\[3\]: maps to target id -1"),
        (lambda d: torch.cat((d[:1], d[:1] - 1, d[2:])), "two draft ids map to the same target id"),
        (lambda d: d[:19], r"d2t: shape \[19\], expected \[20\]"),
    ],
)
def test_mapping_out_of_range(tmp_path, offset, match):
    folder = save_drafter(make_drafter(draft_vocab_size=20, own_lm_head=True), tmp_path / "head")
    edit_tensors(folder, lambda t: t.update(d2t=offset(t["d2t"])))
    refused(folder, match)


def test_wrong_kind_for_the_flag(tmp_path, head):
    refused(head, "is of kind p-eagle, but .* says no parallel_drafting", kind="eagle3")
    eagle = save_drafter(make_drafter(kind="eagle3"), tmp_path / "eagle")
    refused(eagle, "is of kind eagle3, but .* says parallel_drafting", kind="p-eagle")


def test_mask_hidden_without_a_mask_token(head):
    edit_config(head, parallel_drafting=None, ptd_token_id=None)
    refused(head, "mask_hidden: present in .* names no mask token")
