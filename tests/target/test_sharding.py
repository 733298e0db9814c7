"""Targets that one process spreads over several devices by Transformers' plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.config.device_map import parse_device_map
from peagle.config.training import TrainConfig
from peagle.engine import Engine
from peagle.errors import InputError
from peagle.target import Target, load_target, sharding
from peagle.target.sharding import check_alone_on_host
from peagle.training.identity import target_identity
from peagle.training.init import new_drafter
from tests.conftest import VOCAB

accelerate = pytest.importorskip("accelerate")
EVERY_MODULE = dict.fromkeys(
    ("model.embed_tokens", "model.layers", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
)  # fmt: skip
AUX = (1, 3, 5)


def assert_same_states(found: Target, expected: Target, **tolerance: float) -> None:
    """All that training asks of a target, on the device where the head lies."""
    tokens = torch.randint(0, VOCAB, (2, 11), generator=torch.Generator().manual_seed(0))
    mine, theirs = (target.encode(tokens.to(target.device), AUX) for target in (found, expected))
    pairs = [
        (mine.aux, theirs.aux),
        (mine.hidden, theirs.hidden),
        (found.lm_logits(mine.hidden), expected.lm_logits(theirs.hidden)),
        (found.embed_weight, expected.embed_weight),
        (found.lm_head_weight, expected.lm_head_weight),
    ]
    for own, other in pairs:
        assert own.device == found.device
        torch.testing.assert_close(own.cpu(), other.cpu(), **(tolerance or {"rtol": 0, "atol": 0}))
    assert target_identity(found) == target_identity(expected)


@pytest.mark.parametrize("device_map", [{"": "cpu"}, EVERY_MODULE])
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])  # gemma3: windows, a soft cap, tied embeddings
def test_everything_on_the_cpu(target_folder: Any, tiny_target: Any, architecture: str, device_map: Any) -> None:
    target = load_target(str(target_folder(architecture)), device="cpu", device_map=device_map)
    assert_same_states(target, tiny_target(architecture))


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_offloaded_weights_are_found(target_folder: Any, tiny_target: Any, architecture: str) -> None:
    """As modules that a plan leaves on the host beside a GPU: meta tensors in the model, weights in a store."""
    model = load_target(str(target_folder(architecture)), device="cpu").model
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert all(parameter.is_meta for parameter in model.parameters())
    plain = tiny_target(architecture)
    target = Target(model, plain.tokenizer, "offloaded", plain.eos_token_ids, home=torch.device("cpu"))
    assert_same_states(target, plain)
    config = TrainConfig("offloaded", ("data",), "run", layers=2, aux_layer_ids=AUX, train_embeddings=True)
    heads = [new_drafter(config, of, VOCAB - 1, None) for of in (target, plain)]
    assert heads[0][1] == heads[1][1]
    for name, weight in heads[1][0].state_dict().items():
        assert torch.equal(heads[0][0].state_dict()[name], weight), name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("on_gpu", ["first", "second"])
@pytest.mark.parametrize("home", ["cuda", "cpu"])
@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt_oss"])
def test_half_on_a_gpu(target_folder: Any, architecture: str, home: str, on_gpu: str) -> None:
    folder = str(target_folder(architecture))
    plain = load_target(folder, dtype="float32", device="cpu")
    half = plain.num_layers // 2
    places = {"first": (0, "cpu"), "second": ("cpu", 0)}[on_gpu]
    device_map: dict[str, Any] = {f"model.layers.{i}": places[i >= half] for i in range(plain.num_layers)}
    device_map |= {"model.embed_tokens": places[0], "model.rotary_emb": 0, "model.norm": places[1]}
    # tied weights lie together
    device_map["lm_head"] = places[0] if plain.config.tie_word_embeddings else places[1]
    found = load_target(folder, dtype="float32", device=home, device_map=device_map)
    assert found.device.type == home
    assert_same_states(found, plain, rtol=1e-4, atol=1e-3)


def test_engine_needs_one_device(target_folder: Any) -> None:
    target = load_target(str(target_folder("llama")), device="cpu", device_map={"": "cpu"})
    with pytest.raises(InputError, match="target_device_map: the engine needs a model on one device"):
        Engine(target)


# --- the setting ------------------------------------------------------------------------------------------------------


def test_plans_and_objects() -> None:
    assert parse_device_map(None) is None
    assert [parse_device_map(name) for name in ("auto", "balanced_low_0")] == ["auto", "balanced_low_0"]
    assert parse_device_map('{"": 0, "lm_head": "cuda:1"}') == {"": 0, "lm_head": "cuda:1"}
    assert parse_device_map({"model": "cpu"}) == {"model": "cpu"}


@pytest.mark.parametrize("value", ["", "best", "cuda", "{", "[0]", "{}", {}, 0, 1.5, ["auto"]])
def test_neither_plan_nor_object(value: Any) -> None:
    with pytest.raises(InputError, match="expected one of auto, balanced, balanced_low_0, sequential, or a JSON"):
        parse_device_map(value)


@pytest.mark.parametrize("place", ["disk", "gpu", -1, True, None, "cuda", 1.0])
def test_no_device(place: Any) -> None:
    with pytest.raises(InputError, match=r"--flag: 'lm_head' is to lie on .*, expected cpu, a GPU's number or cuda:N"):
        parse_device_map({"": 0, "lm_head": place}, "--flag")


def refused(match: str, folder: Path, **arguments: Any) -> None:
    with pytest.raises(InputError, match=match):
        load_target(str(folder), device="cpu", **arguments)


def test_refusals(target_folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = target_folder("llama")
    refused("target_device_map: got 'best'", folder, device_map="best")
    refused("where the target's layers do not run", folder, device_map="auto", layers="none")
    refused("PyTorch sees .* GPUs here", folder, device_map={"": 99})
    refused("PyTorch sees .* GPUs here", folder, device_map={"": "cuda:99"})
    refused(r"says nothing of model\.layers\.0\.", folder, device_map={"model.embed_tokens": "cpu"})
    refused(r"LlamaForCausalLM has no model\.layer,", folder, device_map={"": "cpu", "model.layer": "cpu"})
    monkeypatch.setattr(sharding, "find_spec", lambda _: None)
    refused(r"needs the package accelerate \(pip install accelerate\)", folder, device_map="auto")


def test_one_process_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    check_alone_on_host()
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InputError, match="4 processes share this machine's GPUs"):
        check_alone_on_host()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # four machines
    check_alone_on_host()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="target_device_map: 2 processes"):
        check_alone_on_host()


def test_states_from_files_need_no_layers() -> None:
    with pytest.raises(InputError, match="target_device_map: got 'auto', expected none with hidden_states"):
        TrainConfig("model", ("data",), "run", target_device_map="auto", hidden_states="states")


def test_another_map_goes_on_with_a_run() -> None:
    one, other = (TrainConfig("m", ("d",), "run", target_device_map=value) for value in ("auto", {"": 0}))
    assert other.differences(one.to_dict()) == []
