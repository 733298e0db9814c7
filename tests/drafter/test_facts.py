import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle.drafter import load_drafter, save_drafter
from peagle.drafter.facts import expected_shapes, read_head_facts
from peagle.errors import InputError
from tests.drafter.heads import make_drafter, make_target_tensors


@pytest.fixture
def head(tmp_path):
    return save_drafter(make_drafter(num_hidden_layers=2), tmp_path / "head", target_name="owner/target")


def rewrite(folder, config=None, drop_keys=(), tensors=None, drop=()):
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | (config or {})
    path.write_text(json.dumps({key: value for key, value in raw.items() if key not in drop_keys}))
    file = folder / "model.safetensors"
    content = load_file(file) | (tensors or {})
    save_file({key: value for key, value in content.items() if key not in drop}, file)


@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_a_good_head(tmp_path, layout, kind):
    drafter = make_drafter(kind=kind, draft_vocab_size=20, own_lm_head=True)
    folder = save_drafter(drafter, tmp_path / "head", layout, target_name="owner/target")
    facts = read_head_facts(folder)
    assert facts.problems == []
    assert (facts.layout, facts.target_name) == (layout, "owner/target")
    assert facts.config == load_drafter(folder).config
    assert facts.num_bytes == sum(
        t.numel() * t.element_size() for t in load_file(folder / "model.safetensors").values()
    )
    assert facts.num_parameters == sum(p.numel() for p in drafter.parameters())


def test_nothing_is_loaded(head, monkeypatch):
    """Neither weights nor a network of their size are made."""
    import peagle.drafter.facts as module

    def refuse(*_args, **_kwargs):
        raise AssertionError("a weight was read")

    real = module.safe_open

    class HeadersOnly:
        def __init__(self, *args, **kwargs):
            self.opened = real(*args, **kwargs).__enter__()

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def keys(self):
            return self.opened.keys()

        def get_slice(self, key):
            return self.opened.get_slice(key)

        get_tensor = refuse

    monkeypatch.setattr(module, "safe_open", HeadersOnly)
    assert read_head_facts(head).problems == []


def test_all_problems_are_listed_not_the_first_only(head):
    rewrite(
        head,
        tensors={"fc.weight": torch.zeros(32, 64), "extra.weight": torch.zeros(2)},
        drop=("mask_hidden", "layers.1.mlp.up_proj.weight", "norm.weight"),
    )
    problems = read_head_facts(head).problems
    assert sorted(problem.split(":")[0] for problem in problems) == [
        "extra.weight",
        "fc.weight",
        "layers.1.mlp.up_proj.weight",
        "mask_hidden",
        "norm.weight",
    ]
    assert "fc.weight: shape [32, 64], expected [32, 96]" in problems


def test_all_problems_of_a_config_are_listed(head):
    rewrite(
        head,
        config={"ptd_token_id": None, "hidden_size": "32", "hidden_act": "gelu"},
        drop_keys=("intermediate_size",),
        drop=("mask_hidden",),
    )
    facts = read_head_facts(head)
    assert facts.config is None
    assert [problem.split(":")[0] for problem in facts.problems] == [
        "hidden_size",
        "intermediate_size",
        "hidden_act",
        "ptd_token_id",
        "mask_hidden",
    ]


BROKEN = {
    "no mask_hidden": {"drop": ("mask_hidden",)},
    "no mask token": {"drop_keys": ("ptd_token_id",)},
    "a mask token outside": {"config": {"ptd_token_id": 60}},
    "auxiliary layers out of order": {"config": {"eagle_aux_hidden_state_layer_ids": [5, 3, 2]}},
    "another architecture": {"config": {"architectures": ["LlamaForCausalLM"]}},
    "heads that do not divide": {"config": {"num_key_value_heads": 3}},
    "both norms": {"config": {"norm_before_fc": True, "fc_norm": True}},
    "a wrong shape": {"tensors": {"norm.weight": torch.zeros(31)}},
    "a strange tensor": {"tensors": {"layers.7.x": torch.zeros(1)}},
    "a reduced vocabulary without d2t": {"config": {"draft_vocab_size": 20}},
}


@pytest.mark.parametrize("how", BROKEN)
def test_whatever_loading_refuses_is_among_the_problems(head, how):
    rewrite(head, **BROKEN[how])
    with pytest.raises(InputError) as refused:
        load_drafter(head)
    field = str(refused.value).split(":")[0].split(",")[0]
    assert any(problem.startswith(field) for problem in read_head_facts(head).problems), refused.value


def test_d2t_outside_the_vocabulary(tmp_path):
    folder = save_drafter(make_drafter(draft_vocab_size=20, own_lm_head=True), tmp_path / "head")
    d2t = load_file(folder / "model.safetensors")["d2t"]
    d2t[3] = 1000
    rewrite(folder, tensors={"d2t": d2t})
    assert read_head_facts(folder).problems == ["d2t[3]: maps to target id 1003, expected 0 to 59"]


def test_damaged_and_missing_files(head, tmp_path):
    (head / "model.safetensors").write_bytes((head / "model.safetensors").read_bytes()[:100])
    assert "truncated" in read_head_facts(head).problems[0]
    (head / "config.json").write_text("{")
    problems = read_head_facts(head).problems
    assert "config.json: not valid JSON" in problems[0]
    assert "truncated" in problems[1]
    shutil.rmtree(head)
    with pytest.raises(InputError, match="not a folder"):
        read_head_facts(head)
    assert len(read_head_facts(tmp_path).problems) == 2


def test_a_shared_lm_head_is_written_for_a_reduced_vocabulary(tmp_path):
    drafter = make_drafter(draft_vocab_size=20)
    drafter.bind(*make_target_tensors())
    facts = read_head_facts(save_drafter(drafter, tmp_path / "head"))
    assert facts.config is not None
    assert facts.config.own_lm_head
    assert not facts.config.own_embed_tokens


def test_expected_shapes_make_no_tensor():
    config = make_drafter().config
    assert expected_shapes(config)["fc.weight"] == (32, 96)


def test_from_the_hub_only_config_and_headers_are_fetched(head, monkeypatch):
    import huggingface_hub

    tensors = load_file(head / "model.safetensors")
    headers = {name: SimpleNamespace(shape=list(t.shape), dtype="BF16") for name, t in tensors.items()}
    fetched = []

    def not_cached(*_args, local_files_only=False, **_kwargs):
        assert local_files_only
        raise FileNotFoundError("not cached")

    def one_file(_name, file):
        fetched.append(file)
        return str(head / file)

    class Api:
        def get_safetensors_metadata(self, _name):
            return SimpleNamespace(files_metadata={"model.safetensors": SimpleNamespace(tensors=headers)})

    monkeypatch.setattr(huggingface_hub, "snapshot_download", not_cached)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one_file)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    facts = read_head_facts("owner/name")
    assert fetched == ["config.json"]
    local = read_head_facts(head)
    assert (facts.config, facts.problems) == (local.config, [])
    assert facts.num_bytes == sum(2 * t.numel() for t in tensors.values())


def test_the_hubs_cached_copy_is_taken_where_there_is_one(head, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_args, **_kwargs: str(head))
    assert read_head_facts("owner/name").problems == []
