"""Cached hidden states: the same training as online, resumable writing, and damage that is found and named."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer
from typer.testing import CliRunner

from peagle.cli.data import data_app
from peagle.data.metadata import target_facts
from peagle.data.shards import Answer, prepare_folder, write_shard
from peagle.drafter import load_drafter
from peagle.errors import InputError
from peagle.target import Target
from peagle.training import batches, states, target_states
from peagle.training import write_states as writing
from peagle.training.state_cache import Placed
from peagle.training.states import StoredStates
from peagle.training.trainer import train, train_on
from peagle.training.write_states import plan_states, target_encoder, write_states
from peagle.work_folder import temporary_name
from tests.conftest import VOCAB

from .helpers import HIDDEN, listed_answers, tiny_target
from .test_distributed import assert_same, run_on, start
from .test_trainer import config, metrics, quiet

LAYERS = (1, 2, 3)


def bf16_target(seed: int = 1) -> Target:
    target = tiny_target(seed=seed)
    target.model.to(torch.bfloat16)
    return target


def write(folder: Path, target: Target, dtype: Any = "bf16", shard_tokens: int = 200, **over: Any) -> list[str]:
    said: list[str] = []
    answers = listed_answers(40)
    plan = plan_states(target, answers, dtype, LAYERS, shard_bytes=shard_tokens * 4 * HIDDEN * 2, **over)
    write_states(plan, answers, lambda: target_encoder(target, LAYERS), folder, said.append)
    return said


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_training_from_cached_states_is_training_online(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # documents that share a call of the target are padded to the longest, which changes how its sums are rounded
    real = batches.group_spans
    for module in (batches, writing):
        monkeypatch.setattr(module, "group_spans", lambda spans, *sizes: [g for s in spans for g in real([s], *sizes)])
    target = bf16_target()
    said = write(tmp_path / "states", target)
    assert "128 bytes a token" in said[0]
    settings: dict[str, Any] = {"kind": kind, "dtype": "bfloat16", "chunk_size": 24, "max_steps": 8}
    train_on(config(tmp_path / "online", **settings), target, listed_answers(40), say=quiet)
    forbid_layers(target)
    settings["hidden_states"] = str(tmp_path / "states")
    train_on(config(tmp_path / "cached", **settings), target, listed_answers(40), say=quiet)
    assert metrics(tmp_path / "cached") == metrics(tmp_path / "online")
    online, cached = (load_drafter(tmp_path / name / "head").state_dict() for name in ("online", "cached"))
    assert all(torch.equal(online[name], cached[name]) for name in online)


def test_states_are_read_ahead_of_their_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, threads = bf16_target(), []
    write(tmp_path / "states", target)
    real = StoredStates.document

    def watched(self: StoredStates, document: int, length: int) -> Any:
        threads.append(threading.current_thread().name)
        return real(self, document, length)

    monkeypatch.setattr(StoredStates, "document", watched)
    settings: dict[str, Any] = {"hidden_states": str(tmp_path / "states"), "validation_documents": 0, "max_steps": 4}
    train_on(config(tmp_path / "ahead", **settings), target, listed_answers(40), say=quiet)
    assert set(threads) == {"batches"}
    # room for one document, which is less than a step: they are read while the step goes on
    monkeypatch.setattr(target_states, "ahead_bytes", lambda: 1)
    threads.clear()
    train_on(config(tmp_path / "tight", **settings), target, listed_answers(40), say=quiet)
    assert set(threads) == {"batches"}
    # and pack by pack, where a step's states are too large to be on the device at once
    monkeypatch.setattr(target_states, "ENCODE_BYTES", 1)
    threads.clear()
    train_on(config(tmp_path / "packs", **settings), target, listed_answers(40), say=quiet)
    assert set(threads) == {"batches"}
    assert metrics(tmp_path / "ahead") == metrics(tmp_path / "tight") == metrics(tmp_path / "packs")


def test_stored_states_that_a_device_keeps_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever share of them has room, and though the reading thread does not know yet what will be kept."""
    target = bf16_target()
    write(tmp_path / "states", target)
    settings: dict[str, Any] = {
        "hidden_states": str(tmp_path / "states"), "validation_documents": 0, "max_steps": None, "epochs": 3,
    }  # fmt: skip
    monkeypatch.setattr(target_states, "ahead_bytes", lambda: 1)
    read: list[int] = []
    real = StoredStates.document

    def watched(self: StoredStates, document: int, length: int) -> Any:
        read.append(document)
        return real(self, document, length)

    monkeypatch.setattr(StoredStates, "document", watched)
    for gib in (0.0, 6e-5, 1.0):
        read.clear()
        train_on(config(tmp_path / str(gib), state_cache_gib=gib, **settings), target, listed_answers(40), say=quiet)
        fewest, most = {0.0: (120, 120), 6e-5: (60, 110), 1.0: (40, 60)}[gib]
        assert fewest <= len(read) <= most, gib
    assert metrics(tmp_path / "0.0") == metrics(tmp_path / "6e-05") == metrics(tmp_path / "1.0")


def forbid_layers(target: Target) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the target ran")

    for layer in target.layers:
        layer.register_forward_pre_hook(refuse)


def test_fp8_trains_nearly_the_same(tmp_path: Path) -> None:
    target = bf16_target()
    losses = {}
    for dtype in ("bf16", "fp8"):
        write(tmp_path / dtype, target, dtype)
        settings = config(tmp_path / f"run-{dtype}", dtype="bfloat16", hidden_states=str(tmp_path / dtype))
        train_on(settings, target, listed_answers(40), say=quiet)
        losses[dtype] = [line["loss"] for line in metrics(tmp_path / f"run-{dtype}") if "loss" in line]
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.05)
    sizes = {dtype: sum(f.stat().st_size for f in (tmp_path / dtype).glob("*.safetensors")) for dtype in losses}
    assert sizes["fp8"] < 0.7 * sizes["bf16"]  # at 16 numbers a scale; half at real widths


def test_stopped_writing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = bf16_target()
    write(tmp_path / "whole", target)
    real, calls = writing.encode_packs, []

    def stop(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(writing, "encode_packs", stop)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "part", target)
    monkeypatch.undo()
    run = config(tmp_path / "run", dtype="bfloat16", hidden_states=str(tmp_path / "part"))
    with pytest.raises(InputError, match=r"4 of 6 shards in .* are not written yet"):
        train_on(run, target, listed_answers(40), say=quiet)
    files = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "part").glob("*.safetensors")}
    assert len(files) == 2
    said = write(tmp_path / "part", target)
    assert "to write" in said[0]
    for name, written in files.items():
        assert (tmp_path / "part" / name).stat().st_mtime_ns == written, "finished shards are left alone"
    names = sorted(file.name for file in (tmp_path / "whole").iterdir())
    assert sorted(file.name for file in (tmp_path / "part").iterdir()) == names
    assert all((tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names)


def damage(folder: Path, shard: int) -> str:
    file = sorted(folder.glob("*.safetensors"))[shard]
    content = bytearray(file.read_bytes())
    content[-7] ^= 16
    file.write_bytes(content)
    return file.name


def test_corrupt_shard_stops_or_is_skipped(tmp_path: Path) -> None:
    target, folder = bf16_target(), tmp_path / "states"
    write(folder, target)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_steps": 3, "hidden_states": str(folder)}
    train_on(config(tmp_path / "good", **settings), target, listed_answers(40), say=quiet)  # notes what was right
    name = damage(folder, 1)
    with pytest.raises(InputError, match=f"corrupt in .*: {name}, with .* documents; delete"):
        train_on(config(tmp_path / "stop", **settings), target, listed_answers(40), say=quiet)
    assert not (tmp_path / "stop").exists()
    said: list[str] = []
    settings["on_corrupt"] = "skip"
    train_on(config(tmp_path / "skip", **settings), target, listed_answers(40), say=said.append)
    lost = len(StoredStates(folder).plan.shards[1])
    assert any(f"left out: {name}, with {lost} documents" in line for line in said)
    assert any(line.startswith(f"data: {40 - lost} documents") for line in said)
    # whoever repairs the folder has other data: a run without those documents does not go on with them
    (folder / name).unlink()
    write(folder, target)
    with pytest.raises(InputError, match="data: fingerprint"):
        train_on(config(tmp_path / "skip", **settings | {"max_steps": 4}), target, listed_answers(40), say=quiet)


def test_an_interrupted_look_at_the_shards_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, bf16_target())
    read: list[str] = []

    def file_digest(file: Path) -> str:
        read.append(file.name)
        if len(read) == 3:
            raise KeyboardInterrupt
        return real(file)

    real = states.file_digest
    monkeypatch.setattr(states, "file_digest", file_digest)
    with pytest.raises(KeyboardInterrupt):
        StoredStates(tmp_path).corrupt_shards()
    assert StoredStates(tmp_path).corrupt_shards() == []
    assert len(read) == len(StoredStates(tmp_path).plan.shards) + 1 > 4  # the third one alone is read twice
    assert StoredStates(tmp_path).corrupt_shards() == []
    assert len(read) == len(StoredStates(tmp_path).plan.shards) + 1
    assert [path.name for path in tmp_path.glob("verified.json*")] == ["verified.json"]


def test_processes_share_the_look_at_the_shards(tmp_path: Path) -> None:
    write(tmp_path / "states", tiny_target())
    settings: dict[str, Any] = {"max_steps": 4, "packs_per_step": 2, "lr": 2e-4}
    settings["hidden_states"] = str(tmp_path / "states")
    train_on(config(tmp_path / "one", **settings), tiny_target(), listed_answers(40), say=quiet)
    (tmp_path / "states" / "verified.json").unlink()
    run_on(2, tmp_path / "two", settings)
    assert_same(tmp_path / "one", tmp_path / "two")
    known = json.loads((tmp_path / "states" / "verified.json").read_text())
    assert len(known) == len(StoredStates(tmp_path / "states").plan.shards)
    name = damage(tmp_path / "states", 1)
    for child in start(2, tmp_path / "stop", settings):
        error = child.communicate(timeout=120)[1].decode()
        assert child.returncode == 1
        assert f"{name}, with" in error


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    target, folder = bf16_target(), tmp_path / "states"
    write(folder, target, max_length=30)

    def refused(match: str, target: Target = target, answers: Any = None, **over: Any) -> None:
        settings = config(tmp_path / "run", dtype="bfloat16", **({"hidden_states": str(folder)} | over))
        with pytest.raises(InputError, match=match):
            train_on(settings, target, answers or listed_answers(40), say=quiet)

    refused("made with the target tiny", target=bf16_target(seed=3))
    others = replace(listed_answers(40), fingerprint="other")
    refused("made of data listed, this is other", answers=others)
    others.corrupt = [Path("a/answers-00001.parquet")]  # as `SoundAnswers` has it
    refused("this is other, without its corrupt shards a/answers-00001.parquet", answers=others)
    refused(r"auxiliary layers 1, 2, 3, the head reads 0, 2, 3", aux_layer_ids=(0, 2, 3))
    refused("cut at 30 tokens, up to 39 are wanted")
    refused(r"no states\.json", hidden_states=str(tmp_path))
    (folder / "states.json").write_text("{}")
    refused("no plan of hidden states")


def test_run_does_not_change_between_online_and_cached(tmp_path: Path) -> None:
    target = bf16_target()
    for dtype in ("bf16", "fp8"):
        write(tmp_path / dtype, target, dtype)
    settings: dict[str, Any] = {"dtype": "bfloat16", "max_steps": 2}
    train_on(config(tmp_path / "run", **settings), target, listed_answers(40), say=quiet)
    settings |= {"hidden_states": str(tmp_path / "fp8"), "max_steps": 4, "lr": 1e-4}
    with pytest.raises(InputError, match=r"lr: 0.003 -> 0.0001.*hidden_states: online -> cached fp8"):
        train_on(config(tmp_path / "run", **settings), target, listed_answers(40), say=quiet)
    # a folder that moved is the same one
    settings = {"dtype": "bfloat16", "max_steps": 2, "hidden_states": str(tmp_path / "bf16")}
    train_on(config(tmp_path / "cached", **settings), target, listed_answers(40), say=quiet)
    shutil.move(tmp_path / "bf16", tmp_path / "moved")
    settings |= {"hidden_states": str(tmp_path / "moved"), "max_steps": 3}
    result = train_on(config(tmp_path / "cached", **settings), target, listed_answers(40), say=quiet)
    assert result is not None
    assert result.steps == 3


def test_other_states_and_full_disks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = bf16_target()
    write(tmp_path / "states", target)
    with pytest.raises(InputError, match="dtype: bf16 -> fp8"):
        write(tmp_path / "states", target, "fp8")
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(1000))
    with pytest.raises(InputError, match=r"its disk has 0\.00 GiB free"):
        write(tmp_path / "new", target)
    assert not (tmp_path / "new").exists()


def test_what_a_killed_run_left_is_gone_before_the_disk_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = bf16_target()
    write(tmp_path, target)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    with monkeypatch.context() as patched:
        patched.setattr("os.getpid", lambda: dead.pid)
        left = temporary_name(tmp_path / "states-00001.safetensors")
    left.write_bytes(b"half")
    file = tmp_path / "states-00001.safetensors"
    file.unlink()
    seen: list[bool] = []
    real = shutil.disk_usage

    def looked(place: Any) -> Any:
        seen.append(left.exists())
        return real(place)

    monkeypatch.setattr(shutil, "disk_usage", looked)
    write(tmp_path, target)
    assert seen == [False]
    assert file.exists()


def test_reading_takes_the_documents_of_a_pack(tmp_path: Path) -> None:
    target, answers = bf16_target(), listed_answers(40)
    write(tmp_path, target)
    assert not StoredStates(tmp_path).corrupt_shards()
    states = StoredStates(tmp_path)
    aux, hidden = states.read(
        [Placed(7, 2, 5), Placed(33, 10, 8)],
        20,
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
    )

    def alone(document: int, length: int) -> Sequence[torch.Tensor]:
        found = target.encode(torch.from_numpy(answers[document].input_ids[None].astype(np.int64)), LAYERS)
        return found.aux[0, :length].float(), found.hidden[0, :length]

    for document, place, length in ((7, 2, 5), (33, 10, 8)):
        own = alone(document, length)
        torch.testing.assert_close(aux[place : place + length], own[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(hidden[place : place + length], own[1], rtol=2e-2, atol=2e-2)
    assert (aux[:2] == 0).all()
    assert (hidden[18:] == 0).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_reading_to_a_gpu_gives_the_same(tmp_path: Path, dtype: str) -> None:
    write(tmp_path, bf16_target(), dtype)
    states, placed = StoredStates(tmp_path), [Placed(7, 2, 5), Placed(33, 10, 8)]
    host, device = (
        states.read(placed, 20, torch.bfloat16, torch.bfloat16, torch.device(name)) for name in ("cpu", "cuda")
    )
    for own, moved in zip(host, device, strict=True):
        torch.testing.assert_close(moved.cpu(), own, rtol=0, atol=0)


def made_up_answers(folder: Path, model: Path) -> None:
    """A data set of 12 documents of 20 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    prepare_folder(folder, target_facts(str(model), tokenizer, VOCAB), {})
    rng = np.random.default_rng(0)
    write_shard(
        folder / "answers-00000.parquet",
        [
            Answer(rng.integers(0, 250, 20).tolist(), [i >= 4 for i in range(20)], "made up", 0.0, "stop", str(n))
            for n in range(12)
        ],
    )


def test_commands_write_states_and_train_from_them(
    tmp_path: Path, target_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = target_folder("qwen3")
    made_up_answers(tmp_path / "data", model)
    arguments = ["hidden-states", str(model), str(tmp_path / "data"), "-o", str(tmp_path / "states"), "--store", "fp8"]
    dry = CliRunner().invoke(data_app, [*arguments, "--dry-run"])
    assert "240 tokens of 12 documents" in dry.output
    assert not (tmp_path / "states").exists()
    done = CliRunner().invoke(data_app, arguments)
    assert done.exit_code == 0, done.output
    assert "1 shards written, 1 in all" in done.output

    def refuse(*_: object) -> None:
        raise AssertionError("the target ran")

    monkeypatch.setattr(Target, "encode", refuse)
    settings = config(
        tmp_path / "run", target=str(model), data=str(tmp_path / "data"), hidden_states=str(tmp_path / "states"),
        aux_layer_ids=None, init="random", max_steps=2,
    )  # fmt: skip
    result = train(settings, say=quiet)
    assert result is not None
    assert result.finished
    error = CliRunner().invoke(data_app, [*arguments[:-1], "fp4"]).exception
    assert isinstance(error, InputError)


def test_a_target_by_transformers_plan(
    tmp_path: Path, target_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    model = target_folder("qwen3")
    made_up_answers(tmp_path / "data", model)
    arguments = ["hidden-states", str(model), str(tmp_path / "data"), "--device", "cpu", "-o"]
    by_plan = ["--target-device-map", '{"": "cpu"}']
    for name, more in (("plain", []), ("spread", by_plan)):
        done = CliRunner().invoke(data_app, [*arguments, str(tmp_path / name), *more])
        assert done.exit_code == 0, done.output
    digests = [(tmp_path / name / "states-00000.sha256").read_text() for name in ("plain", "spread")]
    assert digests[0] == digests[1]
    error = CliRunner().invoke(data_app, [*arguments, str(tmp_path / "none"), *by_plan, "--engine", "vllm"]).exception
    assert isinstance(error, InputError)
    assert "--target-device-map: expected none with --engine vllm" in str(error)

    for name, device_map in (("one", None), ("two", {"": "cpu"})):
        settings = config(
            tmp_path / name, target=str(model), data=str(tmp_path / "data"), aux_layer_ids=None, max_steps=2,
            device="cpu", target_device_map=device_map,
        )  # fmt: skip
        result = train(settings, say=quiet)
        assert result is not None
        assert result.finished
    assert metrics(tmp_path / "two") == metrics(tmp_path / "one")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(InputError, match="target_device_map: 2 processes share this machine's GPUs"):
        train(settings, say=quiet)
