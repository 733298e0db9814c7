"""New drafters: dimensions, mask token, first weights, draft vocabulary, compute copy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from peagle.config.training import TrainConfig
from peagle.drafter import load_drafter, save_drafter
from peagle.errors import InputError
from peagle.target import Target
from peagle.training.draft_vocab import choose_draft_vocab
from peagle.training.init import choose_mask_token, new_drafter
from peagle.training.init_from_head import mask_token_of
from peagle.training.precision import ComputeCopy

from .helpers import HIDDEN, tiny_drafter, tiny_target


def config(**over: Any) -> TrainConfig:
    settings: dict[str, Any] = {"target": "t", "data": "d", "output": "o", "layers": 2, "aux_layer_ids": (1, 2, 3)}
    return TrainConfig(**(settings | over))


def test_starts_from_the_targets_last_layers() -> None:
    target = tiny_target()
    drafter, remarks = new_drafter(config(), target, 63, None)
    assert "copied the target's last 2 layer" in remarks[0]
    third, fourth = target.layers[2], target.layers[3]
    assert torch.equal(drafter.layers[0].self_attn.q_proj.weight[:, HIDDEN:], third.self_attn.q_proj.weight)
    assert drafter.layers[0].self_attn.q_proj.weight[:, :HIDDEN].std() < 0.01
    assert torch.equal(drafter.layers[1].self_attn.q_proj.weight, fourth.self_attn.q_proj.weight)
    assert torch.equal(drafter.layers[0].mlp.gate_proj.weight, third.mlp.gate_proj.weight)
    assert torch.equal(drafter.norm.weight, target.decoder.norm.weight)
    state = torch.randn(5, HIDDEN)
    passed = drafter.combine(torch.cat((torch.zeros(5, 2 * HIDDEN), state), -1))
    assert torch.nn.functional.cosine_similarity(passed, state, dim=-1).min() > 0.9
    assert drafter.config.rope_parameters == dict(target.config.rope_parameters)
    assert not any(p.data_ptr() == q.data_ptr() for p in drafter.parameters() for q in target.model.parameters())


def test_seed_decides_the_weights_and_leaves_the_global_generator_alone() -> None:
    target = tiny_target()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    a, b, c = (new_drafter(config(init="random", seed=s), target, 63, None)[0] for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(a.fc.weight, b.fc.weight)
    assert not torch.equal(a.fc.weight, c.fc.weight)


def test_other_shapes_and_families_start_at_random() -> None:
    remarks = new_drafter(config(intermediate_size=20), tiny_target(), 63, None)[1]
    assert "starting from random weights" in remarks[0]
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=64,
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
        )
    )
    drafter, remarks = new_drafter(config(), Target(model, None, "qwen"), 63, None)
    assert "starting from random weights" in remarks[0]
    assert all(p.isfinite().all() for p in drafter.parameters())


def test_narrower_head_owns_embeddings_and_lm_head() -> None:
    drafter, _ = new_drafter(config(hidden_size=8, head_dim=4, num_key_value_heads=2), tiny_target(), 63, None)
    assert drafter.embed_tokens is not None
    assert drafter.embed_tokens.weight.requires_grad
    assert drafter.fc.weight.shape == (8, 3 * HIDDEN)


class Tokenizer:
    chat_template = "{{ '<|user|>' }}"
    bos_token_id = eos_token_id = unk_token_id = None
    pad_token_id = 60
    added_tokens_decoder = {58: "<|user|>", 59: "<reserved>", 60: "<pad>"}  # noqa: RUF012

    def get_vocab(self) -> dict[str, int]:
        return {str(i): i for i in range(61)}


def test_mask_token_is_never_one_of_the_data() -> None:
    target = tiny_target()
    seen = np.zeros(64, bool)
    seen[:50] = True
    assert choose_mask_token(target, seen, None) == 63
    target.tokenizer = Tokenizer()  # type: ignore[assignment]
    assert choose_mask_token(target, seen, None) == 59, "an added token outside the template"
    seen[59] = True
    assert choose_mask_token(target, seen, None) == 63, "then ids that the tokenizer does not define"
    seen[61:] = True
    assert choose_mask_token(target, seen, None) == 58, "then any id that does not occur"
    assert choose_mask_token(target, seen, 55) == 55
    with pytest.raises(InputError, match="mask_token_id: 7 occurs in the training data"):
        choose_mask_token(target, seen, 7)
    with pytest.raises(InputError, match="mask_token_id: got 64, expected 0 to 63"):
        choose_mask_token(target, seen, 64)
    with pytest.raises(InputError, match="every id"):
        choose_mask_token(target, np.ones(64, bool), None)


def test_draft_vocabulary_by_frequency() -> None:
    vocab = choose_draft_vocab(np.array([5, 0, 9, 9, 1, 0]), 3)
    assert vocab.target_ids.tolist() == [0, 2, 3]
    assert (torch.arange(3) + vocab.d2t).tolist() == [0, 2, 3]
    assert vocab.t2d.tolist() == [True, False, True, True, False, False]
    assert vocab.coverage == pytest.approx(23 / 24)
    assert vocab.draft_ids().tolist() == [0, -1, 1, 2, -1, -1]
    with pytest.raises(InputError, match="draft_vocab_size: got 7, expected 1 to 6"):
        choose_draft_vocab(np.ones(6), 7)


def test_compute_copy_sends_gradients_to_the_master() -> None:
    master = tiny_drafter("p-eagle", 1, torch.float32)
    copy = ComputeCopy(master, torch.bfloat16)
    copy.bind(torch.randn(61, HIDDEN, dtype=torch.bfloat16), torch.randn(61, HIDDEN, dtype=torch.bfloat16))
    assert copy.compute.rotary.inv_freq.dtype == torch.float32, "positions need float32"
    for _ in range(2):
        copy.compute.combine(torch.ones(4, 3 * HIDDEN, dtype=torch.bfloat16)).float().sum().backward()
    assert copy.compute.fc.weight.grad is None
    assert master.fc.weight.grad is not None
    assert torch.allclose(master.fc.weight.grad, torch.full_like(master.fc.weight, 8.0))
    with torch.no_grad():
        master.fc.weight.add_(1.0)
    copy.refresh()
    assert torch.equal(copy.compute.fc.weight, master.fc.weight.to(torch.bfloat16))
    assert ComputeCopy(master, torch.float32).compute is master


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("kind", "eagle2", "kind: got 'eagle2', expected one of p-eagle, eagle3"),
        ("keep_rate", 1.5, "keep_rate: got 1.5, expected 0 to 1"),
        ("k_train", 0, "k_train: got 0, expected a whole number of 1 or more"),
        ("layers", 1.5, "layers: got 1.5"),
        ("lr", 0.0, "lr: got 0.0, expected a number above 0"),
        ("chunk_size", "big", "chunk_size: got 'big'"),
        ("max_minutes", -1, "max_minutes: got -1, expected a number above 0"),
        ("data", (), "data: missing"),
    ],
)
def test_config_names_field_value_and_expectation(field: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        config(**{field: value})


def test_config_from_file_and_flags(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('target = "t"\ndata = ["a", "b"]\nlr = 1e-3\nlayers = 3\n')
    made = TrainConfig.from_sources(file, {"output": "o", "layers": 1, "seed": None})
    assert (made.data, made.lr, made.layers, made.seed) == (("a", "b"), 1e-3, 1, 0)
    assert made.differences(made.to_dict()) == []
    other = TrainConfig.from_sources(file, {"output": "p", "max_steps": 5, "keep_rate": 0.5})
    assert other.differences(made.to_dict()) == ["layers: 1 -> 3", "keep_rate: 0.8 -> 0.5"]
    file.write_text("learning_rate = 1\n")
    with pytest.raises(InputError, match="'learning_rate' is no training setting"):
        TrainConfig.from_sources(file, {})
    file.write_text("lr = \n")
    with pytest.raises(InputError, match="not valid TOML"):
        TrainConfig.from_sources(file, {})
    with pytest.raises(InputError, match="output: missing"):
        TrainConfig.from_sources(None, {"target": "t", "data": ("d",)})


def test_a_run_can_start_from_a_head(tmp_path: Path) -> None:
    target = tiny_target()
    head = new_drafter(config(init="random", seed=5), target, 63, None)[0]
    save_drafter(head, tmp_path / "head", target_name="t")
    settings = config(init=str(tmp_path / "head"))
    assert mask_token_of(settings.init) == 63
    drafter, remarks = new_drafter(settings, target, 63, None)
    assert remarks[-1].startswith("init: copied the head")
    saved = load_drafter(tmp_path / "head", dtype=torch.float32).state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in drafter.state_dict().items())
    assert all(p.requires_grad for p in drafter.parameters())
    # what no setting names is the head's, and auxiliary layers that it does not name are the run's
    raw = json.loads((tmp_path / "head" / "config.json").read_text())
    del raw["eagle_aux_hidden_state_layer_ids"], raw["rope_parameters"]
    (tmp_path / "head" / "config.json").write_text(json.dumps(raw | {"rope_theta": 77.0, "rms_norm_eps": 1e-3}))
    drafter, remarks = new_drafter(settings, target, 63, None)
    assert (drafter.config.rope_parameters["rope_theta"], drafter.config.rms_norm_eps) == (77.0, 1e-3)
    assert drafter.config.aux_hidden_state_layer_ids == (1, 2, 3)
    assert "names no auxiliary layers: [1, 2, 3] are read" in remarks[-1]
    with pytest.raises(InputError, match=r"init: .*num_hidden_layers: 1, the head has 2"):
        new_drafter(config(init=str(tmp_path / "head"), layers=1), target, 63, None)
    with pytest.raises(InputError, match=r"init: the head .* \(kind: 'eagle3', the head has 'p-eagle'"):
        new_drafter(config(init=str(tmp_path / "head"), kind="eagle3"), target, 63, None)
    with pytest.raises(InputError, match="nowhere"):
        new_drafter(config(init=str(tmp_path / "nowhere")), target, 63, None)
