"""Heads written and read in both layouts, in other makers' spellings, and everything that is refused."""

import json
import resource
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter import check_fits, load_drafter, save_drafter
from peagle.drafter import checkpoint as checkpoint_module
from peagle.errors import InputError
from tests.drafter.heads import HIDDEN, VOCAB, causal_attend, make_config, make_drafter, make_target_tensors

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
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 4096},
    {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
    {"hidden_size": 16, "target_hidden_size": HIDDEN, "own_embed_tokens": True, "own_lm_head": True},
]


def edit_config(folder, **changes):
    """Change keys of config.json; a value of None takes the key away."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def head(tmp_path):
    """A saved one-layer P-EAGLE head."""
    return save_drafter(make_drafter(), tmp_path / "head")


# --- round trips -----------------------------------------------------------------------------------------------------


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


# --- what stock vLLM reads -------------------------------------------------------------------------------------------

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
    """The names of DESIGN section 3; vLLM prefixes all but the last four groups with `model.` itself."""
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


# --- other makers' spellings -----------------------------------------------------------------------------------------


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


# --- refusals --------------------------------------------------------------------------------------------------------


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
    refused(head, r"config\.json (is not valid JSON|holds .*expected a JSON object)")


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
        ({"hidden_size": None}, "hidden_size: missing in"),
        ({"vocab_size": None}, "vocab_size: missing in"),
        ({"hidden_size": "wide"}, "wrong type"),
        ({"num_hidden_layers": [2]}, "wrong type"),
        ({"peagle": "text"}, "wrong type"),
        ({"eagle_aux_hidden_state_layer_ids": 5}, "wrong type"),
        ({"eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": "3"}, "wrong type"),
        ({"eagle_aux_hidden_state_layer_ids": None, "num_aux_hidden_states": 2}, r"(fc.weight|mask_hidden): shape .*"),
        ({"eagle_aux_hidden_state_layer_ids": [5, 3, 2]}, r"got \[5, 3, 2\].*ascending"),
        ({"ptd_token_id": None}, "ptd_token_id: missing"),
        ({"ptd_token_id": 60}, "ptd_token_id: got 60, expected 0 to 59"),
        ({"ptd_token_id": "59"}, "wrong type"),
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
        return save_drafter(make_drafter(), tmp_path / "head", "speculators")

    edit_config(saved(), speculators_model_type="dflash")
    refused(tmp_path / "head", "speculators_model_type: got 'dflash', expected 'peagle' or 'eagle3'")
    edit_config(saved(), transformer_layer_config=None)
    refused(tmp_path / "head", "transformer_layer_config: missing")
    edit_config(saved(), mask_token_id=None)
    refused(tmp_path / "head", "ptd_token_id: missing, expected the id of the mask token")
    edit_config(saved(), speculators_config=[1], peagle=None)
    refused(tmp_path / "head", "wrong type")


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


# --- another target --------------------------------------------------------------------------------------------------


def test_a_head_that_fits():
    check_fits(make_config(), vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=6)
    own = make_config(hidden_size=16, target_hidden_size=HIDDEN, own_embed_tokens=True, own_lm_head=True)
    check_fits(own, vocab_size=VOCAB, hidden_size=HIDDEN, num_layers=6)


@pytest.mark.parametrize(
    ("config", "target", "match"),
    [
        ({}, {"hidden_size": 64}, "target_hidden_size 32, but the target's is 64"),
        ({}, {"vocab_size": 61}, "vocab_size 60, but the target's is 61"),
        ({}, {"num_layers": 5}, r"eagle_aux_hidden_state_layer_ids \[2, 3, 5\], but the target has 5 layers"),
        (
            {"hidden_size": 16, "target_hidden_size": 32, "own_lm_head": True},
            {},
            "hidden_size 16 differs from the target's 32, so it cannot share",
        ),
    ],
)
def test_a_head_for_another_target(config, target, match):
    facts = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": 6} | target
    with pytest.raises(InputError, match=match):
        check_fits(make_config(**config), **facts)


# --- writing ---------------------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(checkpoint_module, "config_json", fail)
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
