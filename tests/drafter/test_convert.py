import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.drafter import load_drafter, save_drafter
from peagle.drafter.convert import convert_head, layout_name
from peagle.drafter.facts import read_head_facts
from peagle.errors import InputError
from tests.drafter.heads import make_drafter

HEADS = {
    "plain": {},
    "eagle3": {"kind": "eagle3"},
    "fc_norm": {"fc_norm": True, "norm_output": True, "num_hidden_layers": 3},
    "norm_before_fc": {"norm_before_fc": True, "norm_before_residual": True},
    "reduced": {"draft_vocab_size": 20, "own_lm_head": True},
    "own": {"own_embed_tokens": True, "own_lm_head": True, "attention_bias": True},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "no k": {"k_train": None},
}


def same_tensors(a, b):
    a, b = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    assert set(a) == set(b)
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_there_and_back(tmp_path, name, layout):
    other = "speculators" if layout == "native" else "native"
    start = save_drafter(make_drafter(**HEADS[name]), tmp_path / "start", layout, target_name="owner/target")
    there = convert_head(start, tmp_path / "there", other)
    back = convert_head(there, tmp_path / "back", layout)
    same_tensors(start, back)
    assert json.loads((back / "config.json").read_text()) == json.loads((start / "config.json").read_text())
    assert read_head_facts(there).layout == other
    assert read_head_facts(there).problems == []
    first, second = load_drafter(start), load_drafter(there)
    assert first.config == second.config
    for (key, a), b in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b), key
    direct = save_drafter(first, tmp_path / "direct", other, target_name="owner/target")
    same_tensors(there, direct)  # what training would have written


def test_fp32_tensors_and_foreign_ones_keep_their_bits(tmp_path):
    start = save_drafter(make_drafter(draft_vocab_size=20, own_lm_head=True), tmp_path / "start")
    content = {
        key: t.float() + 1e-5 if t.is_floating_point() else t
        for key, t in load_file(start / "model.safetensors").items()
    }
    content["verifier_norm.weight"] = torch.randn(32)
    del content["t2d"]
    save_file(content, start / "model.safetensors")
    there = load_file(convert_head(start, tmp_path / "there", "speculators") / "model.safetensors")
    for name, tensor in content.items():
        assert torch.equal(there[layout_name(name, "speculators")], tensor), name
    assert int(there["t2d"].sum()) == 20
    assert set(there) == {layout_name(name, "speculators") for name in content} | {"t2d"}


def test_a_mapping_of_the_whole_vocabulary_to_itself_is_left_out(tmp_path):
    """As amazon/GPT-OSS-20B-P-EAGLE has it, and no auxiliary layers in its config."""
    start = save_drafter(make_drafter(num_hidden_layers=4, own_embed_tokens=True, own_lm_head=True), tmp_path / "start")
    content = load_file(start / "model.safetensors")
    mapping = {"d2t": torch.zeros(60, dtype=torch.int64), "t2d": torch.ones(60, dtype=torch.bool)}
    save_file(content | mapping, start / "model.safetensors")
    raw = json.loads((start / "config.json").read_text())
    del raw["eagle_aux_hidden_state_layer_ids"]
    (start / "config.json").write_text(json.dumps(raw))
    for layout in ("native", "speculators"):
        there = convert_head(start, tmp_path / layout, layout)
        found = load_file(there / "model.safetensors")
        assert set(found) == {layout_name(name, layout) for name in content}
        assert "eagle_aux_hidden_state_layer_ids" not in json.loads((there / "config.json").read_text())
        assert load_drafter(there).config == load_drafter(start).config


def test_other_files_come_along(tmp_path):
    start = save_drafter(make_drafter(), tmp_path / "start")
    (start / "README.md").write_text("card")
    there = convert_head(start, tmp_path / "there", "speculators")
    assert sorted(path.name for path in there.iterdir()) == ["README.md", "config.json", "model.safetensors"]


def test_no_overwriting_without_force(tmp_path):
    start = save_drafter(make_drafter(), tmp_path / "start")
    there = convert_head(start, tmp_path / "there", "speculators")
    (there / "README.md").write_text("of the old one")
    before = (there / "config.json").read_text()
    with pytest.raises(InputError, match="exists, expected a new folder"):
        convert_head(start, there, "native")
    assert (there / "config.json").read_text() == before
    convert_head(start, there, "native", force=True)
    assert read_head_facts(there).layout == "native"
    assert not (there / "README.md").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start", "there"]


def test_what_force_does_not_replace(tmp_path):
    start = save_drafter(make_drafter(), tmp_path / "start")
    with pytest.raises(InputError, match="is the head itself"):
        convert_head(start, start, "speculators", force=True)
    (tmp_path / "empty").mkdir()
    assert read_head_facts(convert_head(start, tmp_path / "empty", "speculators", force=True)).problems == []
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("")
    with pytest.raises(InputError, match="not a head's folder"):
        convert_head(start, tmp_path / "home", "speculators", force=True)
    with pytest.raises(InputError, match="--layout"):
        convert_head(start, tmp_path / "x", "gguf")


def test_a_broken_head_is_refused_and_nothing_written(tmp_path):
    start = save_drafter(make_drafter(), tmp_path / "start")
    content = load_file(start / "model.safetensors")
    del content["mask_hidden"]
    save_file(content, start / "model.safetensors")
    with pytest.raises(InputError, match="mask_hidden"):
        convert_head(start, tmp_path / "there", "speculators")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start"]


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch, force):
    start = save_drafter(make_drafter(), tmp_path / "start")
    if force:
        convert_head(start, tmp_path / "there", "native")
    names = sorted(path.name for path in tmp_path.iterdir())

    def full(*_args, **_kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("peagle.drafter.saving.save_file", full)
    with pytest.raises(InputError, match="No space left"):
        convert_head(start, tmp_path / "there", "speculators", force=force)
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    if force:
        assert read_head_facts(tmp_path / "there").layout == "native"


def test_a_move_that_fails_puts_the_old_one_back(tmp_path, monkeypatch):
    start = save_drafter(make_drafter(), tmp_path / "start")
    there = convert_head(start, tmp_path / "there", "native")
    real = os.rename

    def fail(source, target, *args, **kwargs):
        if str(target) == str(there) and "old" not in str(source):
            raise OSError(5, "Input/output error")
        return real(source, target, *args, **kwargs)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(InputError, match="cannot be written"):
        convert_head(start, there, "speculators", force=True)
    assert read_head_facts(there).layout == "native"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start", "there"]
