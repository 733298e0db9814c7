"""What a user can get wrong is refused before training, or says which flag to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from peagle.data.metadata import target_facts
from peagle.data.shards import Answer, prepare_folder, write_shard
from peagle.errors import InputError
from peagle.training import step, target_states, trainer
from peagle.training import validate as validation
from peagle.training.answers import open_answers
from peagle.training.average import WeightAverage
from peagle.training.distributed import World
from peagle.training.memory import fits
from peagle.training.optimizer import Optimizer
from peagle.training.trainer import train, train_on

from .helpers import ListedAnswers, ListedExample, listed_answers, tiny_target
from .test_trainer import config, quiet


def examples(lengths: list[int], answered: bool = True) -> ListedAnswers:
    return ListedAnswers([ListedExample(np.arange(3, 3 + n, dtype=np.int32), np.full(n, answered)) for n in lengths])


def test_short_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    answers = listed_answers(30)
    answers.examples += examples([0, 1, 1]).examples
    said: list[str] = []
    result = train_on(config(tmp_path, max_steps=2), tiny_target(), answers, say=said.append)
    assert result is not None
    assert any(line.startswith("data: 30 documents") and "3 shorter than 2 tokens" in line for line in said)


@pytest.mark.parametrize("answers", [examples([1, 1]), examples([20, 30], answered=False)])
def test_nothing_to_learn_from_is_refused(tmp_path: Path, answers: ListedAnswers) -> None:
    with pytest.raises(InputError, match="none of 2 documents has an answer token"):
        train_on(config(tmp_path / "run"), tiny_target(), answers, say=quiet)
    assert not (tmp_path / "run").exists()


def test_a_run_does_not_end_over_another_model(tmp_path: Path) -> None:
    """Its head would go there; said before the training and not behind it."""
    other = tmp_path / "run" / "head"
    other.mkdir(parents=True)
    (other / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InputError, match="head is not a head's folder"):
        train_on(config(tmp_path / "run", max_steps=2), tiny_target(), listed_answers(30), say=quiet)
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("chunk_size", [64, 16])
def test_packs_without_supervision_beside_others(tmp_path: Path, chunk_size: int) -> None:
    """A document whose only answer token cannot be predicted by any depth but the first; many chunks without a row."""
    answers = examples([40] * 6, answered=False)
    for example in answers.examples:
        example.answer_mask[-1] = True
    settings = config(tmp_path, max_steps=2, packs_per_step=1, chunk_size=chunk_size, validation_documents=0)
    result = train_on(settings, tiny_target(), answers, say=quiet)
    assert result is not None
    assert result.finished


def folder(path: Path, tokenizer: Any, vocab_size: int) -> str:
    prepare_folder(path, target_facts(path.name, tokenizer, vocab_size), {})
    row = Answer(list(range(20)), [i > 3 for i in range(20)], "made up", 0.0, "stop", "0")
    write_shard(path / "answers-00000.parquet", [row])
    return str(path)


def test_mixed_tokenizers_are_refused(tmp_path: Path, target_folder: Callable[[str], Path]) -> None:
    model = target_folder("llama")
    own, other = AutoTokenizer.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    other.add_tokens(["another"])
    mine, strange = folder(tmp_path / "mine", own, 320), folder(tmp_path / "strange", other, 320)
    settings: dict[str, Any] = {"target": str(model), "aux_layer_ids": None}
    with pytest.raises(InputError, match=r"made with strange, .* with mine: two tokenizers"):
        train(config(tmp_path / "run", data=(mine, strange), **settings), say=quiet)
    with pytest.raises(InputError, match="made with the tokenizer of strange; this target has another"):
        train(config(tmp_path / "run", data=strange, **settings), say=quiet)
    assert not (tmp_path / "run").exists()


def test_a_corrupt_shard_of_answers_is_skipped_or_stops(tmp_path: Path, target_folder: Callable[[str], Path]) -> None:
    model = target_folder("llama")
    data = Path(folder(tmp_path / "data", AutoTokenizer.from_pretrained(model), 320))
    sound = (data / "answers-00000.parquet").read_bytes()
    (data / "answers-00001.parquet").write_bytes(sound[: len(sound) // 2])
    (data / "answers-00002.parquet").write_bytes(sound)
    settings: dict[str, Any] = {
        "target": str(model), "data": str(data), "aux_layer_ids": None, "max_steps": 1, "validation_documents": 0,
        "device": "cpu",
    }  # fmt: skip
    with pytest.raises(InputError, match=r"answers-00001.parquet: corrupt shard.*\(--on-corrupt skip\)"):
        train(config(tmp_path / "stop", **settings), say=quiet)
    with pytest.raises(InputError, match=r"corrupt shard.*make it anew and then the hidden states") as caught:
        train(config(tmp_path / "stop", hidden_states=str(tmp_path / "states"), **settings), say=quiet)
    assert "--on-corrupt" not in str(caught.value), "states of all documents do not fit the others"
    said: list[str] = []
    result = train(config(tmp_path / "skip", on_corrupt="skip", **settings), say=said.append)
    assert result is not None
    assert result.finished
    assert f"data: corrupt and left out: {data / 'answers-00001.parquet'}" in said
    assert any(line.startswith("data: 2 documents, 40 tokens") for line in said)
    for path in data.glob("*.parquet"):
        path.write_bytes(b"")
    with pytest.raises(InputError, match=r"all 3 shards are corrupt, .*answers-00000.parquet"):
        train(config(tmp_path / "skip", on_corrupt="skip", **settings), say=quiet)


def test_skipping_finds_what_the_reader_would(tmp_path: Path, target_folder: Callable[[str], Path]) -> None:
    data = folder(tmp_path / "data", AutoTokenizer.from_pretrained(target_folder("llama")), 320)
    whole, skipping = (open_answers([data], how, quiet) for how in ("stop", "skip"))
    assert skipping.fingerprint == whole.fingerprint
    assert [example.input_ids.tolist() for example in skipping] == [example.input_ids.tolist() for example in whole]


def test_shards_of_one_process_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--parallel fsdp: only for several processes \(torchrun\)"):
        train(config(tmp_path / "run", parallel="fsdp", device="cpu"), say=quiet)


def test_a_device_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device: got 'tpu', expected cpu, cuda or cuda:N"):
        train(config(tmp_path / "run", device="tpu"), say=quiet)


NO_GPU_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")
NO_HOST_MEMORY = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("error", [NO_GPU_MEMORY, NO_HOST_MEMORY])
@pytest.mark.parametrize(
    ("module", "function", "flags"),
    [(step, "train_pack", "chunk of 16 anchors with 32 rows .*lower --chunk-size first, then --loss-rows"),
     (target_states, "encode_packs", "documents of up to 64 tokens .*lower --pack-length, or read --hidden-states")],
)  # fmt: skip
@pytest.mark.parametrize("dry_run", [False, True])
def test_too_little_memory_says_which_flag_to_lower(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    module: ModuleType,
    function: str,
    flags: str,
    dry_run: bool,
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, function, fail)
    settings = config(tmp_path, chunk_size=16, loss_rows=32)
    with pytest.raises(InputError, match=flags) as caught:
        train_on(settings, tiny_target(), listed_answers(30), dry_run=dry_run, say=quiet)
    assert str(error).splitlines()[0] in str(caught.value)


@pytest.mark.parametrize(
    ("place", "function", "flags"),
    [(World, "mean_gradients", "gradients and optimizer of the head .*lower --layers"),
     (torch.nn.utils, "clip_grad_norm_", "gradients and optimizer of the head .*lower --layers"),
     (Optimizer, "step", "gradients and optimizer of the head .*lower --layers"),
     (validation, "head_loss", "validation with chunks of 16 anchors .*lower --chunk-size first, then --loss-rows")],
)  # fmt: skip
def test_too_little_memory_outside_a_chunk_says_which_flag_to_lower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Any, function: str, flags: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NO_GPU_MEMORY

    monkeypatch.setattr(place, function, fail)
    with pytest.raises(InputError, match=flags):
        train_on(config(tmp_path, chunk_size=16, max_steps=2), tiny_target(), listed_answers(30), say=quiet)


def test_too_little_memory_for_the_average_says_which_flag_to_lower() -> None:
    average = WeightAverage([], decay=0.9)
    average.parameters = [torch.nn.Parameter(torch.zeros(1).expand(1 << 58))]  # its copy would be 2^60 bytes
    with pytest.raises(InputError, match=r"ema_decay: .*lower --layers"), average.in_place():
        pass


def test_a_target_that_does_not_fit_says_how_it_might(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target_folder: Callable[[str], Path]
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NO_GPU_MEMORY

    model = target_folder("llama")
    data = folder(tmp_path / "data", AutoTokenizer.from_pretrained(model), 320)
    monkeypatch.setattr(trainer, "load_target", fail)
    with pytest.raises(InputError, match=r"does not fit .*--target-device-map, .*--hidden-states.*20.00 GiB"):
        train(config(tmp_path / "run", target=str(model), data=(str(data),), device="cpu"), say=quiet)


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes"), fits("a", "b"):
        raise RuntimeError("shapes do not fit")


def test_a_request_for_too_much_host_memory_is_recognised() -> None:
    with pytest.raises(InputError, match=r"x does not fit .*: lower y"), fits("x", "lower y"):
        torch.empty(1 << 60)
