"""Wrong values of a head's `config.json`: every key in turn, as `peagle inspect`, loading and conversion take them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peagle.drafter import load_drafter, save_drafter
from peagle.drafter.config_keys import Layout
from peagle.drafter.config_problems import config_problems
from peagle.drafter.convert import convert_head
from peagle.drafter.facts import read_head_facts
from peagle.errors import InputError
from tests.cli.conftest import run_peagle
from tests.drafter.heads import make_drafter

NAN = float("nan")
WRONG: list[Any] = [
    *(None, True, 0, -1, 3, 1.5, 10**400, NAN),
    *("x", "8", [], ["x"], {}, {"a": 1}),
]
ABSENT = object()
# written for other readers and by none of ours read: one value of each will do
UNREAD = {
    *("dtype", "torch_dtype", "tie_word_embeddings", "mlp_bias", "speculators_version", "algorithm"),
    *("default_proposal_method", "proposal_type", "verifier", "name_or_path", "target"),
}
# keys that nothing of ours writes, and that are read
UNWRITTEN: dict[str, Any] = {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 5], "norm_before_fc": False},
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256, "rope_theta": 1e4},
}
NATIVE = {"mask_token_id": 59, "pard_token": 59, "speculators_model_type": None}
PEAGLE = {"max_train_length": 64, "draft_window": 32}


def places(value: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """The way to every key, of objects within objects too, also within a list's."""
    for key, inner in value.items():
        yield (key,)
        if isinstance(inner, list) and inner and isinstance(inner[0], dict):
            yield from ((key, 0, *more) for more in places(inner[0]))
        if isinstance(inner, dict):
            yield from ((key, *more) for more in places(inner))


def changed(raw: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(raw))
    holder = copy
    for key in place[:-1]:
        holder = holder[key]
    if value is ABSENT:
        del holder[place[-1]]
    else:
        holder[place[-1]] = value
    return copy


def rich(folder: Path, kind: str, layout: str) -> dict[str, Any]:
    """A head's config with all keys that are read."""
    save_drafter(make_drafter(kind=kind), folder, layout, "owner/target")  # type: ignore[arg-type]
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    raw |= {"eagle_config": UNWRITTEN["eagle_config"]}
    raw["peagle"] |= PEAGLE
    if layout == "native":
        raw |= {"rope_scaling": UNWRITTEN["rope_scaling"]} | (NATIVE if kind == "p-eagle" else {})
    else:
        raw["transformer_layer_config"]["rope_scaling"] = UNWRITTEN["rope_scaling"]
    return raw


def attempt(action: Callable[[], Any]) -> tuple[Any, str | None]:
    """What it gives, and the refusal if it is refused; no other exception may come."""
    try:
        return action(), None
    except InputError as error:
        return None, str(error)


def judged(head: Path, work: Path, raw: dict[str, Any]) -> list[str]:
    """All three, which have to agree; what inspect lists."""
    (head / "config.json").write_text(json.dumps(raw))
    facts = read_head_facts(head)
    drafter, refusal = attempt(lambda: load_drafter(head))
    assert (refusal is None) == (facts.problems == []), (facts.problems, refusal)
    assert facts.config is not None or refusal == facts.problems[0]
    other: Layout = "speculators" if facts.layout == "native" else "native"
    there, unconverted = attempt(lambda: convert_head(head, work, other))
    assert unconverted == refusal
    assert work.exists() == (refusal is None)
    if refusal is None:
        assert facts.config == drafter.config == load_drafter(there).config
        shutil.rmtree(there)
    return facts.problems


@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_any_value_of_any_key(tmp_path, kind, layout):
    """Never another exception than InputError, and inspect and loading never differ."""
    head = tmp_path / "head"
    raw = rich(head, kind, layout)
    assert judged(head, tmp_path / "work", raw) == []
    refused = 0
    for place in places(raw):
        for value in WRONG[-1:] if place[-1] in UNREAD else (*WRONG, ABSENT):
            try:
                refused += bool(judged(head, tmp_path / "work", changed(raw, place, value)))
            except Exception as error:
                error.add_note(f"{'.'.join(map(str, place))}: {value!r}")
                raise
    assert refused > 100


SLIPS: list[tuple[dict[str, Any], str]] = [
    ({"rope_parameters": {"rope_type": "yarnn", "rope_theta": 1e4}}, "rope_parameters: got {'rope_type': 'yarnn'"),
    ({"rope_parameters": "x"}, "rope_parameters: got 'x', expected an object"),
    (
        {"rope_scaling": {"rope_type": "yarn", "factor": "x"}},
        "rope_scaling.factor: got 'x', expected a positive",
    ),
    ({"rope_scaling": {"rope_type": "yarn"}}, "rope_parameters: got {'rope_type': 'yarn'"),
    (
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}},
        "all 8",
    ),
    ({"rope_theta": -1}, "rope_theta: got -1, expected a positive number"),
    ({"architectures": -1}, "architectures: got -1, expected ['LlamaForCausalLMEagle3']"),
    ({"draft_vocab_size": True}, "draft_vocab_size: got True, expected a positive integer"),
    ({"draft_vocab_size": 61}, "draft_vocab_size: got 61, expected 1 to 60"),
    ({"head_dim": True}, "head_dim: got True, expected a positive integer"),
    ({"head_dim": NAN}, "head_dim: got nan, expected a positive integer"),
    ({"head_dim": 7}, "head_dim: got 7, expected an even number"),
    ({"num_attention_heads": 6}, "hidden_size: got 32, expected a multiple of num_attention_heads (6)"),
    ({"head_dim": None, "num_attention_heads": 64}, "hidden_size: got 32, expected a multiple of"),
    ({"num_key_value_heads": 1.5}, "num_key_value_heads: got 1.5, expected a positive integer"),
    ({"num_key_value_heads": 3}, "num_attention_heads: got 4, expected a multiple of num_key_value_heads (3)"),
    ({"target_hidden_size": -1}, "target_hidden_size: got -1, expected a positive integer"),
    ({"target_hidden_size": "x"}, "target_hidden_size: got 'x', expected a positive integer"),
    ({"target_hidden_size": {}}, "target_hidden_size: got {}, expected a positive integer"),
    ({"num_hidden_layers": True}, "num_hidden_layers: got True, expected a positive integer"),
    ({"hidden_size": 2**40}, f"hidden_size: got {2**40}, expected a positive integer up to 1048576"),
    ({"fc_norm": "false"}, "fc_norm: got 'false', expected true or false"),
    ({"fc_norm": True, "norm_before_fc": True}, "norm_before_fc, fc_norm: both are set"),
    ({"ptd_token_id": None, "pard_token": 60}, "pard_token: got 60, expected 0 to 59"),
    (
        {"eagle_aux_hidden_state_layer_ids": [5, 3, 2]},
        "eagle_aux_hidden_state_layer_ids: got [5, 3, 2]",
    ),
]


@pytest.mark.parametrize(("changes", "message"), SLIPS, ids=str)
def test_each_slip_is_named(head, changes, message):
    raw = json.loads((head / "config.json").read_text()) | changes
    (head / "config.json").write_text(json.dumps(raw))
    result = run_peagle("inspect", head)
    assert (result.exit_code, result.stderr) == (1, "")
    [problem] = config_problems(raw)
    assert message in problem
    assert problem in result.stdout
    with pytest.raises(InputError) as refused:
        load_drafter(head)
    assert str(refused.value) == problem


def test_all_of_them_are_listed(head):
    """Also those of several keys together, and RoPE's, whatever else is wrong."""
    raw = json.loads((head / "config.json").read_text())
    raw |= {"rope_parameters": {"rope_type": "yarnn"}, "num_key_value_heads": 3, "draft_vocab_size": 70}
    raw |= {"fc_norm": True, "norm_before_fc": True, "ptd_token_id": 60, "hidden_size": "x", "peagle": {"k_train": 0}}
    keys = [problem.split(":")[0] for problem in config_problems(raw)]
    assert keys == [
        *("k_train", "hidden_size", "rope_parameters", "num_attention_heads", "draft_vocab_size"),
        *("ptd_token_id", "norm_before_fc, fc_norm"),
    ]


@pytest.mark.parametrize("text", ['{"a": ' + "1" * 5000 + "}", "[" * 100000, "null", "3", "\x00"], ids=lambda t: t[:6])
def test_a_file_that_is_no_config(head, text):
    (head / "config.json").write_text(text)
    [problem] = read_head_facts(head).problems
    assert problem.startswith("config.json: ")
    assert run_peagle("inspect", head).exit_code == 1


def test_a_null_speculators_model_type_is_none(tmp_path, head):
    raw = json.loads((head / "config.json").read_text()) | {"speculators_model_type": None}
    (head / "config.json").write_text(json.dumps(raw))
    facts = read_head_facts(head)
    assert (facts.layout, facts.problems) == ("native", [])
    there = convert_head(head, tmp_path / "there", "speculators")
    assert read_head_facts(there).layout == "speculators"
    assert json.loads((convert_head(there, tmp_path / "back", "native") / "config.json").read_text()) == raw
