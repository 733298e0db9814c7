import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config, MambaConfig, PreTrainedConfig, T5Config, ViTConfig

from peagle.drafter import load_drafter, save_drafter
from peagle.vllm.serve import Installed
from tests.cli.conftest import run_peagle
from tests.conftest import COMMON


def test_as_text(target, heads):
    result = run_peagle("inspect", heads["p-eagle"], "--target", target)
    assert result.exit_code == 0, result.output
    for part in (
        "P-EAGLE",
        "layout                  native",
        "K trained               4",
        "mask token              300",
        "auxiliary layers        2, 3, 4",
        "shared with the target  embeddings and LM head",
        "mask_hidden",
        "BF16",
        "1x1x96",
        "(llama, 7 layers): fits",
        "problems: none",
        "peagle: takes head and target",
        "vLLM: takes head and target",
        "needs 0.16 or later",
    ):
        assert part in result.stdout


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_as_json(heads, kind):
    result = run_peagle("inspect", heads[kind], "--json")
    assert result.exit_code == 0
    content = json.loads(result.stdout)
    assert (content["kind"], content["layout"], content["target"]) == (kind, "native", None)
    assert content["config"]["mask_token_id"] == (300 if kind == "p-eagle" else None)
    assert content["size_bytes"] == sum(t.nbytes for t in load_file(Path(heads[kind]) / "model.safetensors").values())
    assert content["shares"] == ["embeddings", "LM head"]
    assert content["problems"] == []


def test_another_target_and_damage_are_all_listed(heads, tmp_path, target_folder):
    head = save_drafter(load_drafter(heads["p-eagle"]), tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    del tensors["mask_hidden"], tensors["norm.weight"]
    save_file(tensors, head / "model.safetensors")
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [2, 3, 30]}))
    result = run_peagle("inspect", head, "--target", target_folder("qwen3"))
    assert result.exit_code == 1
    for part in (
        "mask_hidden: missing",
        "norm.weight: missing",
        "[2, 3, 30], but the target has 7 layers",
        "does not fit",
        "peagle: does not take head and target",
        "vLLM: does not take head and target",
    ):
        assert part in result.stdout
    assert result.stdout.count("norm.weight: missing") == 1


def test_no_head_at_all(tmp_path):
    for what in ("/no/such/folder", "./x", "owner/name"):  # the last one: tests reach no network
        result = run_peagle("inspect", what)
        assert result.exit_code == 2
        assert "head: " in result.stderr
        assert "Traceback" not in result.stderr


def test_a_target_that_is_none(heads, tmp_path):
    result = run_peagle("inspect", heads["eagle3"], "--target", tmp_path)
    assert result.exit_code == 2
    assert "config.json" in result.stderr


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Lfm2Config(**COMMON, layer_types=["conv", "full_attention", *["conv"] * 5]), "has layers of type conv"),
        (MambaConfig(**COMMON), "has layers of type linear_attention"),
        (T5Config(**COMMON), "could not be loaded"),
    ],
    ids=["hybrid", "recurrent", "no decoder"],
)
def test_a_target_that_our_engine_refuses(heads, tmp_path, config: PreTrainedConfig, reason: str):
    """From its config alone, in the engine's own words; vLLM judges architectures by itself."""
    config.save_pretrained(tmp_path / "target")
    result = run_peagle("inspect", heads["p-eagle"], "--target", tmp_path / "target", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    ours, vllm = content["engines"]["peagle"], content["engines"]["vllm"]
    assert content["target"]["fits"]
    assert not ours["takes"]
    assert len(ours["problems"]) == 1
    assert reason in ours["problems"][0]
    assert (vllm["takes"], vllm["problems"]) == (True, [])
    text = run_peagle("inspect", heads["p-eagle"], "--target", tmp_path / "target").stdout
    assert f"peagle: does not take head and target\n  {ours['problems'][0]}\nvLLM: takes head and target" in text


def test_a_target_that_no_engine_takes(heads, tmp_path, monkeypatch):
    monkeypatch.setattr("peagle.vllm.serve.find_vllm", lambda: Installed("vllm", "0.15.2", ("vllm", "serve")))
    MambaConfig(**COMMON).save_pretrained(tmp_path / "target")
    result = run_peagle("inspect", heads["eagle3"], "--target", tmp_path / "target")
    assert result.exit_code == 1
    assert "vLLM: does not take head and target\n  vLLM: 0.15.2 is installed, expected 0.16 or later" in result.stdout


def test_a_target_without_a_language_model(heads, tmp_path):
    ViTConfig().save_pretrained(tmp_path / "target")
    result = run_peagle("inspect", heads["eagle3"], "--target", tmp_path / "target")
    assert result.exit_code == 2
    assert "(model_type vit) has no vocab_size, expected that of a decoder-only language model" in result.stderr
