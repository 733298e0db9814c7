"""Heads written and read again in both layouts, and disks that do not take them."""

import json
import resource

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter import load_drafter, save_drafter, saving
from peagle.errors import InputError
from tests.drafter.heads import (
    HIDDEN,
    VOCAB,
    causal_attend,
    edit_tensors,
    make_drafter,
    make_target_tensors,
)

VARIANTS = [
    {},
    {"num_hidden_layers": 3},
    {"own_embed_tokens": True},
    {"own_lm_head": True},
    {"own_embed_tokens": True, "own_lm_head": True, "draft_vocab_size": 20},
    {"norm_before_residual": True, "norm_output": True},
    {"norm_before_fc": True},
    {"fc_norm": True, "aux_hidden_state_layer_ids": (1, 4)},
    {"attention_bias": True},
    {"head_dim": 16, "rms_norm_eps": 1e-6, "k_train": None},
    {"max_train_length": 2520, "draft_window": 1024},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 4096},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"hidden_size": 16, "target_hidden_size": HIDDEN, "own_embed_tokens": True, "own_lm_head": True},
]


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_round_trip(tmp_path, variant, layout, kind):
    drafter = make_drafter(kind=kind, **variant)
    save_drafter(drafter, tmp_path / "head", layout, target_name="some/target")
    loaded = load_drafter(tmp_path / "head", kind=kind)
    assert loaded.config == drafter.config
    expected = drafter.state_dict()
    assert set(loaded.state_dict()) == set(expected)
    for name, tensor in loaded.state_dict().items():
        wanted = expected[name].to(torch.bfloat16) if expected[name].is_floating_point() else expected[name]
        torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")
    assert torch.equal(loaded.rotary.inv_freq, drafter.rotary.inv_freq)
    assert not loaded.training


@pytest.mark.parametrize("layout", ["native", "speculators"])
def test_a_loaded_head_computes_the_same(tmp_path, layout):
    """bfloat16 weights to begin with, so that nothing is lost in the file."""
    drafter = make_drafter(num_hidden_layers=2, norm_before_residual=True).bfloat16().float()
    loaded = load_drafter(save_drafter(drafter, tmp_path / "head", layout), dtype=torch.float32)
    for module in (drafter, loaded):
        module.bind(*make_target_tensors())
    mask = causal_attend(torch.ones(6, 6, dtype=torch.bool).tril())
    ids, aux = torch.arange(6), torch.randn(6, 96)
    with torch.no_grad():
        out = [m.logits(m(m.embed(ids), m.combine(aux), torch.arange(6), mask)[0]) for m in (drafter, loaded)]
    assert torch.equal(out[0], out[1])


def test_saving_again_changes_nothing(tmp_path, head):
    again = save_drafter(load_drafter(head), tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (head / "model.safetensors").read_bytes()
    assert (again / "config.json").read_text() == (head / "config.json").read_text()


def test_dtype_and_device(head):
    assert load_drafter(head).fc.weight.dtype == torch.bfloat16
    drafter = load_drafter(head, dtype=torch.float32, device="cpu")
    assert {p.dtype for p in drafter.parameters()} == {torch.float32}
    assert drafter.rotary.inv_freq.dtype == torch.float32


def test_a_bound_target_is_not_written(tmp_path):
    drafter = make_drafter()
    drafter.bind(*make_target_tensors())
    names = set(load_file(save_drafter(drafter, tmp_path / "head") / "model.safetensors"))
    assert not names & {"embed_tokens.weight", "lm_head.weight"}


def test_reduced_vocabulary_is_written_with_its_rows_of_the_lm_head(tmp_path):
    """vLLM shares the target's whole LM head or none of it, so a head with some rows carries them."""
    drafter = make_drafter(draft_vocab_size=20)
    with pytest.raises(InputError, match=r"lm_head: .*expected a bound target"):
        save_drafter(drafter, tmp_path / "head")
    embed, lm_head = make_target_tensors()
    drafter.bind(embed, lm_head)
    tensors = load_file(save_drafter(drafter, tmp_path / "head") / "model.safetensors")
    ids = torch.arange(20) + tensors["d2t"]
    assert torch.equal(tensors["lm_head.weight"], lm_head[ids].bfloat16())
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["t2d"].nonzero()[:, 0], ids)
    loaded = load_drafter(tmp_path / "head")
    assert torch.equal(loaded.to_target_ids(torch.arange(20)), ids)


def test_a_reduced_head_of_others_without_lm_head_takes_the_targets_rows(tmp_path):
    drafter = make_drafter(draft_vocab_size=20, own_lm_head=True)
    save_drafter(drafter, tmp_path / "head")
    edit_tensors(tmp_path / "head", lambda tensors: tensors.pop("lm_head.weight"))
    loaded = load_drafter(tmp_path / "head", dtype=torch.float32)
    embed, lm_head = make_target_tensors()
    loaded.bind(embed, lm_head)
    assert torch.equal(loaded.lm_head_weight(), lm_head[torch.arange(20) + loaded.d2t])


LAYER = {
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
}


def test_native_tensor_names(tmp_path):
    """The names of docs/method.md; vLLM prefixes all but the last four groups with `model.` itself."""
    drafter = make_drafter(num_hidden_layers=2, draft_vocab_size=20, own_embed_tokens=True, own_lm_head=True)
    tensors = load_file(save_drafter(drafter, tmp_path / "head") / "model.safetensors")
    expected = {f"midlayer.{name}" for name in LAYER | {"hidden_norm.weight"}} | {f"layers.1.{name}" for name in LAYER}
    expected |= {"fc.weight", "norm.weight", "embed_tokens.weight", "lm_head.weight", "mask_hidden", "d2t", "t2d"}
    assert set(tensors) == expected
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors["mask_hidden"].shape == (1, 1, 3 * HIDDEN)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (32, 2 * HIDDEN)
    assert tensors["layers.1.self_attn.q_proj.weight"].shape == (32, HIDDEN)
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16, torch.int64, torch.bool}


def test_native_config(tmp_path):
    drafter = make_drafter(num_hidden_layers=2, norm_before_residual=True)
    raw = json.loads((save_drafter(drafter, tmp_path / "head") / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "vocab_size": VOCAB,
        "draft_vocab_size": VOCAB,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": [2, 3, 5],
        "num_aux_hidden_states": 3,
        "parallel_drafting": True,
        "ptd_token_id": 59,
        "max_position_embeddings": 512,
    }
    assert {key: raw[key] for key in expected} == expected
    eagle = save_drafter(make_drafter(kind="eagle3"), tmp_path / "eagle")
    raw = json.loads((eagle / "config.json").read_text())
    assert not {"parallel_drafting", "ptd_token_id", "mask_token_id", "pard_token"} & set(raw)


def test_speculators_config_has_what_vllm_validates(tmp_path):
    drafter = make_drafter(norm_output=True)
    folder = save_drafter(drafter, tmp_path / "head", "speculators", target_name="some/target")
    raw = json.loads((folder / "config.json").read_text())
    assert raw["speculators_model_type"] == "peagle"
    assert raw["mask_token_id"] == 59
    assert "model_type" not in raw  # vLLM recognises the layout by its absence
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 8
    assert raw["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    layer = raw["transformer_layer_config"]
    assert layer["model_type"] == "llama"
    assert layer["num_aux_hidden_states"] == 3
    assert layer["norm_output"] is True
    assert set(load_file(folder / "model.safetensors")) >= {f"layers.0.{name}" for name in LAYER}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 123456.0},
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ],
)
def test_transformers_reads_the_same_rope(tmp_path, rope):
    """A wrong RoPE setting ruins acceptance without an error, so another reader has to find exactly ours."""
    drafter = make_drafter(rope_parameters=rope, max_position_embeddings=2048)
    config = AutoConfig.from_pretrained(save_drafter(drafter, tmp_path / "head"))
    assert config.rope_parameters == rope
    assert config.max_position_embeddings == 2048
    assert torch.equal(LlamaRotaryEmbedding(config).inv_freq, drafter.rotary.inv_freq)


def listing(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def limited_file_size(size):
    """The system refuses to let any file grow beyond `size` bytes, much as a full disk does."""

    class Limit:
        def __enter__(self):
            self.before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, self.before[1]))

        def __exit__(self, *_):
            resource.setrlimit(resource.RLIMIT_FSIZE, self.before)

    return Limit()


@pytest.mark.parametrize("size", [0, 1000, 20000])
def test_no_space_while_saving_a_new_head(tmp_path, size):
    with pytest.raises(InputError, match=r"output: .*head cannot be written"), limited_file_size(size):
        save_drafter(make_drafter(), tmp_path / "head")
    assert not list(tmp_path.iterdir())


def test_no_space_while_saving_over_a_head(tmp_path, head):
    (head / "README.md").write_text("a model card")
    before = listing(head)
    with pytest.raises(InputError, match="cannot be written"), limited_file_size(20000):
        save_drafter(make_drafter(seed=1), head)
    assert listing(head) == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_config_that_cannot_be_written_leaves_the_old_head(tmp_path, head, monkeypatch):
    """The tensors are complete by then, and still nothing of the new head may show."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    before = listing(head)
    monkeypatch.setattr(saving, "config_json", fail)
    for target in (head, tmp_path / "new"):
        with pytest.raises(InputError, match="No space left on device"):
            save_drafter(make_drafter(seed=1), target)
    assert listing(head) == before
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_saving_over_a_head_keeps_the_card_and_readable_modes(head):
    (head / "README.md").write_text("a model card")
    save_drafter(make_drafter(kind="eagle3", seed=1), head)
    assert (head / "README.md").read_text() == "a model card"
    assert load_drafter(head).config.kind == "eagle3"
    assert head.stat().st_mode & 0o777 == 0o755
    assert {path.stat().st_mode & 0o044 for path in head.iterdir()} == {0o044}


def test_output_that_cannot_be_a_folder(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "head"):
        with pytest.raises(InputError, match=r"output: .* cannot be written"):
            save_drafter(make_drafter(), path)
    assert (tmp_path / "file").read_text() == "mine"
    assert len(list(tmp_path.iterdir())) == 1
