import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config, MambaConfig, PreTrainedConfig, T5Config, ViTConfig

from peagle.drafter import Drafter, load_drafter, save_drafter
from peagle.drafter.draft_vocabulary import FILE, write_draft_vocabulary
from peagle.target.loading import load_target
from peagle.vllm.installation import Installed
from tests.cli.conftest import run_peagle
from tests.conftest import COMMON, VOCAB

MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


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
        "draft vocabulary        the target's, all 320 tokens",
        "mask_hidden",
        "BF16",
        "1x1x96",
        "(llama, 7 layers): fits",
        "problems: none",
        "peagle: takes head and target\n  num_speculative_tokens: 1 or more; trained for 4; more drafts",
        "draft_vocabulary.json: none; a CPU drafts from the whole vocabulary",
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


def needs_of(head: object, *more: object) -> dict:
    result = run_peagle("inspect", head, *more, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["engines"]["peagle"]["needs"]


def test_weights_that_our_engine_needs(target, heads, monkeypatch):
    """As many bytes as the two have when they are loaded, and whether this machine has them."""
    head, model = load_drafter(heads["eagle3"]), load_target(target, "float32", "cpu").model
    numbers = [sum(p.numel() for p in module.parameters()) for module in (head, model)]
    for available, fits in ((4 * sum(numbers), True), (4 * sum(numbers) - 1, False), (None, None)):
        monkeypatch.setattr("peagle.vllm.needs.host_memory", lambda size=available: size)
        needs = needs_of(heads["eagle3"], "--target", target)
        assert [needs["weights"][part]["cpu_bytes"] for part in ("head", "target")] == [4 * n for n in numbers]
        assert [needs["weights"][part]["gpu_bytes"] for part in ("head", "target")] == [2 * n for n in numbers]
        assert needs["here"] == {"device": "cpu", "available_bytes": available, "fits": fits}
    monkeypatch.setattr("peagle.vllm.needs.host_memory", lambda: 2048)
    text = run_peagle("inspect", heads["eagle3"], "--target", target).stdout
    assert "weights on a GPU: about " in text
    assert "here, on a CPU, 2.0 KiB are free: they do not fit" in text
    alone = needs_of(heads["eagle3"])  # of no target nothing is known
    assert (alone["weights"]["target"], alone["here"]["fits"]) == (None, None)
    assert "are free" not in run_peagle("inspect", heads["eagle3"]).stdout


def test_a_target_in_mxfp4_needs_less(heads, tmp_path, target_folder):
    shutil.copytree(target_folder("gpt_oss"), tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"quantization_config": MXFP4}))
    result = run_peagle("inspect", heads["p-eagle"], "--target", tmp_path / "target")
    assert result.exit_code == 0, result.output
    assert "the target is stored in mxfp4: less where it stays so" in result.stdout


def test_the_list_that_a_cpu_drafts_from(heads, tmp_path):
    head = save_drafter(load_drafter(heads["p-eagle"]), tmp_path / "head")
    counts = np.zeros(VOCAB, dtype=np.int64)
    counts[:128] = 1
    write_draft_vocabulary(head, counts)
    assert needs_of(head)["draft_vocabulary"] == {"listed": 128, "coverage": 1.0, "problem": None}
    line = f"draft_vocabulary.json: 128 of {VOCAB} tokens, 100.0% of what stood in the answers; a CPU drafts from them"
    assert line in run_peagle("inspect", head).stdout
    content = json.loads((head / FILE).read_text())
    del content["coverage"]  # not needed to draft
    (head / FILE).write_text(json.dumps(content))
    assert f"128 of {VOCAB} tokens; a CPU" in run_peagle("inspect", head).stdout
    (head / FILE).write_text(json.dumps(content | {"coverage": "most"}))
    assert f"128 of {VOCAB} tokens; a CPU" in run_peagle("inspect", head).stdout
    (head / FILE).write_text(json.dumps(content | {"vocab_size": 7}))
    assert "draft_vocabulary.json cannot be used: vocab_size: got 7" in run_peagle("inspect", head).stdout


def test_a_head_with_tokens_of_its_own_reads_no_list(heads, tmp_path):
    config = replace(load_drafter(heads["eagle3"]).config, draft_vocab_size=64, own_lm_head=True, k_train=None)
    head = save_drafter(Drafter(config), tmp_path / "head")
    (head / FILE).write_text("not read")
    assert needs_of(head)["draft_vocabulary"] is None
    text = run_peagle("inspect", head).stdout
    assert f"draft vocabulary        64 of {VOCAB} tokens" in text
    assert "num_speculative_tokens: 1 or more; the head does not say what it was trained for" in text
    assert "draft_vocabulary.json" not in text


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
    monkeypatch.setattr("peagle.vllm.installation.find_vllm", lambda: Installed("vllm", "0.15.2", ("vllm", "serve")))
    MambaConfig(**COMMON).save_pretrained(tmp_path / "target")
    result = run_peagle("inspect", heads["eagle3"], "--target", tmp_path / "target")
    assert result.exit_code == 1
    assert "vLLM: does not take head and target\n  vLLM: 0.15.2 is installed, expected 0.16 or later" in result.stdout


def install(monkeypatch, version: str | None) -> None:
    found = None if version is None else Installed("vllm", version, ("vllm", "serve"))
    monkeypatch.setattr("peagle.vllm.installation.find_vllm", lambda: found)


@pytest.mark.parametrize(
    ("installed", "takes"), [("0.20.1", False), ("0.21.0", True), ("0.1.dev3+g1234567", True), (None, True)]
)
def test_what_is_known_to_fail(heads, tmp_path, monkeypatch, target, installed: str | None, takes: bool):
    """In the installed version, where that is known, it is a problem of vLLM; otherwise it says in which it will fail.
    Either way our engine's verdict is the exit status."""
    head = save_drafter(load_drafter(heads["p-eagle"]), tmp_path / "head", "speculators")
    install(monkeypatch, installed)
    result = run_peagle("inspect", head, "--target", target, "--json")
    assert result.exit_code == 0, result.output
    vllm = json.loads(result.stdout)["engines"]["vllm"]
    what = "P-EAGLE heads in the speculators layout are not known"
    assert vllm["takes"] is takes
    (known,) = [known for known in vllm["known"] if known["what"].startswith(what)]
    assert (known["fails_at_start"], known["fails_here"]) == (True, not takes)
    text = run_peagle("inspect", head, "--target", target).stdout
    assert text.count(what) == 1
    assert f"vLLM: {'takes' if takes else 'does not take'} head and target" in text
    if takes:
        assert vllm["problems"] == []
        assert f"\n  will fail in vLLM, up to 0.20: {what}" in text
    else:
        assert len(vllm["problems"]) == 1
        assert f"does not take head and target\n  will fail in the installed vLLM {installed}: {what}" in text
    # a note stays one
    assert "\n  up to 0.33: P-EAGLE lives in the V1 model runner only" in text


def test_a_head_that_fails_in_the_one_engine_left(heads, tmp_path, monkeypatch):
    head = save_drafter(load_drafter(heads["p-eagle"]), tmp_path / "head", "speculators")
    MambaConfig(**COMMON).save_pretrained(tmp_path / "target")
    for version, status in (("0.20.1", 1), ("0.21.0", 0)):
        install(monkeypatch, version)
        assert run_peagle("inspect", head, "--target", tmp_path / "target").exit_code == status


def test_tensor_names_that_vllm_does_not_take(heads, tmp_path, target):
    head = save_drafter(load_drafter(heads["eagle3"]), tmp_path / "head")
    tensors = load_file(head / "model.safetensors")
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, head / "model.safetensors")
    result = run_peagle("inspect", head, "--target", target)
    assert result.exit_code == 0  # our engine takes it
    assert "peagle: takes head and target" in result.stdout
    assert "vLLM: does not take head and target\n  model.fc.weight and" in result.stdout
    mended = tmp_path / "mended"
    assert run_peagle("convert", head, mended, "--layout", "native").exit_code == 0
    assert "vLLM: takes head and target" in run_peagle("inspect", mended, "--target", target).stdout


def test_a_target_without_a_language_model(heads, tmp_path):
    ViTConfig().save_pretrained(tmp_path / "target")
    result = run_peagle("inspect", heads["eagle3"], "--target", tmp_path / "target")
    assert result.exit_code == 2
    assert "(model_type vit) has no vocab_size, expected that of a decoder-only language model" in result.stderr
