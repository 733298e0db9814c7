"""The published heads at full size without weights, and their layout at small size in the engine."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.config.training import TrainConfig
from peagle.drafter import Drafter, save_drafter
from peagle.drafter.config import with_aux_layers
from peagle.drafter.facts import expected_shapes, read_head_facts
from peagle.drafter.fit import check_fits
from peagle.drafter.layouts import parse_config
from peagle.engine import Engine
from peagle.engine.loading import load_bound_drafter
from peagle.target import Target
from peagle.target.facts import target_facts
from peagle.target.head_fit import target_problems, target_warnings
from peagle.training.init import drafter_config
from peagle.vllm.needs import head_traits
from peagle.vllm.serve import Installed
from peagle.vllm.serve import run as serve
from peagle.vllm.versions import known_problems
from tests.cli.conftest import run_peagle
from tests.conftest import MASK
from tests.engine.helpers import SEQUENCES, assert_same, greedy, make_engine, replay, run
from tests.vllm.published import HEADS, LAYERS, Published, as_published, target_config, write_headers


@pytest.mark.parametrize("name", HEADS)
def test_full_size_shapes(name, tmp_path):
    head = HEADS[name]
    facts = read_head_facts(write_headers(tmp_path / "head", head))
    assert facts.problems == []
    assert facts.config is not None
    config = facts.config
    assert (config.kind, config.num_hidden_layers, config.mask_token_id) == ("p-eagle", LAYERS, head.mask_token)
    assert config.own_embed_tokens
    assert config.own_lm_head
    assert not config.reduced_vocab
    assert expected_shapes(config) == head.module_shapes()
    if name == "gpt-oss-20b":
        assert head.shapes()["mask_hidden"] == (1, 1, 8640)
    if name == "gpt-oss-120b":
        assert 1.65e9 < facts.num_parameters < 1.75e9
    target = target_facts(target_config(name))
    assert target_problems(facts, target) == []
    check_fits(config, **target.fits_arguments)
    assert with_aux_layers(config, target.num_layers)[0].aux_hidden_state_layer_ids == head.aux
    assert any(f"{list(head.aux)} are taken as in vLLM" in text for text in target_warnings(facts, target))
    other = target_facts(target_config("gpt-oss-20b" if name.startswith("qwen") else "qwen3-coder-30b"))
    assert len(target_problems(facts, other)) >= 2


@pytest.mark.parametrize("name", HEADS)
def test_training_for_the_full_size_target_gives_these_shapes(name):
    """Target and head stand on the meta device; only the sizes of the head's own MLP are named."""
    head = HEADS[name]
    with torch.device("meta"):
        target = Target(AutoModelForCausalLM.from_config(target_config(name), dtype=torch.bfloat16), None, name)
    settings = TrainConfig(
        target=name, data=("answers",), output="run", layers=LAYERS, k_train=head.k_train,
        intermediate_size=4 * head.hidden, train_embeddings=True, train_lm_head=True, mask_token_id=head.mask_token,
    )  # fmt: skip
    config = drafter_config(settings, target, head.mask_token)
    assert expected_shapes(config) == head.module_shapes()
    assert config.aux_hidden_state_layer_ids == head.aux
    assert (config.k_train, config.mask_token_id) == (head.k_train, head.mask_token)
    assert config.max_position_embeddings == head.max_length
    assert config.rope_parameters["rope_type"] == ("yarn" if name.startswith("gpt-oss") else "default")
    # what a head that shares takes from this target has the shapes that it would bring itself
    assert target.embed_weight.shape == head.shapes()["embed_tokens.weight"]
    assert target.lm_head_weight.shape == head.shapes()["lm_head.weight"]


@pytest.mark.parametrize("name", HEADS)
def test_what_inspect_says_at_full_size(name, tmp_path):
    head = HEADS[name]
    folder = write_headers(tmp_path / "head", head)
    target_config(name).save_pretrained(tmp_path / "target")
    result = run_peagle("inspect", folder, "--target", tmp_path / "target")
    assert result.exit_code == 0, result.output
    for part in (
        "kind                    P-EAGLE",
        "layers                  4",
        f"hidden size             {head.hidden} (target {head.hidden})",
        "K trained               not said",
        f"mask token              {head.mask_token}",
        "auxiliary layers        not said",
        f"draft vocabulary        the target's, all {head.vocab} tokens",
        f"longest sequence        {head.max_length} (RoPE llama3)",
        "shared with the target  nothing",
        f"1x1x{3 * head.hidden}",
        f"{head.target_layers} layers): fits",
        f"{list(head.aux)} are taken as in vLLM",
        "problems: none",
        "peagle: takes head and target",
        "0.30 and later: a head with a d2t tensor",
        "peagle convert HEAD OUTPUT --layout native",
    ):
        assert part in result.stdout, part
    assert ("KV-cache groups" in result.stdout) is (name == "gpt-oss-20b")


def test_serving_the_20b_in_vllm_at_full_size(tmp_path, monkeypatch, capsys):
    """The README's command: what is worth knowing of the head as published, and of the converted one."""
    installed = Installed("vllm", "0.32.0", ("vllm", "serve"))
    monkeypatch.setattr("peagle.vllm.serve.find_vllm", lambda: installed)
    head = write_headers(tmp_path / "head", HEADS["gpt-oss-20b"])
    target_config("gpt-oss-20b").save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").touch()
    serve(str(tmp_path / "target"), {"model": str(head), "num_speculative_tokens": 5}, dry_run=True)
    printed = capsys.readouterr()
    assert '"method": "eagle3", "parallel_drafting": true' in printed.out
    assert "[2, 12, 21] are taken as in vLLM" in printed.err
    assert "vLLM 0.30 and later: a head with a d2t tensor" in printed.err
    assert "KV-cache groups" not in printed.err  # fixed by then


@pytest.mark.parametrize("name", HEADS)
def test_full_size_forward_without_weights(name):
    """Rows go through the whole network at K_train depths, on the meta device."""
    head = HEADS[name]
    folder_config = replace(parse_config(head.config_json()), own_embed_tokens=True, own_lm_head=True)
    with torch.device("meta"):
        drafter = Drafter(folder_config).to(torch.bfloat16)
        rows = 2 * (1 + head.k_train)
        aux = torch.empty(rows, 3 * head.hidden, dtype=torch.bfloat16)
        positions = torch.arange(rows)
        seen = []

        def attend(layer, q, k, v):
            seen.append((layer, tuple(q.shape), tuple(k.shape), tuple(v.shape)))
            return torch.empty_like(q)

        hidden = drafter.combine(aux)
        assert drafter.mask_state().shape == (head.hidden,)
        normed, _ = drafter(drafter.embed(positions), hidden, positions, attend)
        assert drafter.logits(normed).shape == (rows, head.vocab)
    kv = (rows, head.kv_heads, head.head_dim)
    assert seen == [(layer, (rows, head.heads, head.head_dim), kv, kv) for layer in range(LAYERS)]


def test_only_the_20b_needs_the_kv_group_fix(tmp_path):
    """12 + 4 full-attention layers against 12 with a window; 18 + 4 against 18 stay below the old threshold."""
    needing = []
    for name, head in HEADS.items():
        facts = read_head_facts(write_headers(tmp_path / name, head))
        traits = head_traits(facts, target_facts(target_config(name)))
        if any("36684" in p.instead for p in known_problems((0, 16), traits)):
            needing.append(name)
        assert not any("36684" in p.instead for p in known_problems((0, 25), traits))
    assert needing == ["gpt-oss-20b"]


@pytest.mark.parametrize("k", [3, 5, 10])
@pytest.mark.parametrize("architecture", ["gpt_oss", "qwen3_moe"])
def test_the_engine_changes_no_token(architecture, k, tiny_target, tmp_path, caplog):
    """Drafts that are right for 0 to K tokens, in turn, over contexts beyond the sliding window."""
    target = tiny_target(architecture)
    plain = [run(make_engine(target), [prompt], greedy(24))[0].output_token_ids for prompt in SEQUENCES]
    small = Published("small", k, target.hidden_size, 4, 2, 8, target.vocab_size, target.num_layers, MASK, 512)
    torch.manual_seed(5)
    config = replace(parse_config(small.config_json()), own_embed_tokens=True, own_lm_head=True)
    folder = as_published(save_drafter(Drafter(config), tmp_path / "head"), tmp_path / "published", small)
    tensors = {name: tensor.shape for name, tensor in read_head_facts(folder).tensors.items()}
    assert tensors == small.shapes() | {"d2t": (target.vocab_size,), "t2d": (target.vocab_size,)}
    drafter = load_bound_drafter(target, SpeculativeConfig(str(folder), k, parallel_drafting=True))
    assert "[2, 3, 4] are taken as in vLLM" in caplog.text
    engine = Engine(target, drafter, k, EngineConfig(max_num_seqs=8, max_model_len=128))
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    order = torch.randperm(4 * (k + 1), generator=torch.Generator().manual_seed(k)) % (k + 1)
    replay(engine, known, order.tolist())
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(24)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)
    assert engine.stats.spec.num_accepted_tokens > 0
