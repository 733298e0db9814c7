"""Whole runs on a tiny target: learning, logs, the head that is written."""

from __future__ import annotations

import itertools
import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import peagle
from peagle.config.training import TrainConfig
from peagle.drafter import Drafter, load_drafter
from peagle.drafter.draft_vocabulary import read_draft_vocabulary
from peagle.errors import InputError
from peagle.training import trainer, weights
from peagle.training.logs import MetricsLog
from peagle.training.plots import plot_run
from peagle.training.trainer import train_on

from .helpers import ListedAnswers, ListedExample, listed_answers, tiny_target


def config(output: Path, **over: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "target": "tiny",
        "data": "listed",
        "output": str(output),
        "layers": 1,
        "aux_layer_ids": (1, 2, 3),
        "pack_length": 64,
        "packs_per_step": 2,
        "k_train": 4,
        "ttt_steps": 4,
        "lr": 3e-3,
        "max_steps": 12,
        "log_every": 1,
        "validate_every": 5,
        "validation_documents": 3,
        "tensorboard": False,
    }
    return TrainConfig(**(settings | over))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Logged values that do not depend on the clock."""
    clock = ("elapsed", "tokens_per_second", "peak_gib")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in clock} for line in lines]


def quiet(_message: str) -> None:
    pass


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_run_writes_head_and_logs(tmp_path: Path, kind: str) -> None:
    target, answers = tiny_target(), listed_answers(40)
    result = train_on(config(tmp_path, kind=kind, chunk_size=24), target, answers, say=quiet)
    assert result is not None
    assert result.finished
    assert result.steps == 12
    head = load_drafter(tmp_path / "head", kind=kind)  # type: ignore[arg-type]
    assert head.config.k_train == 4
    assert head.config.aux_hidden_state_layer_ids == (1, 2, 3)
    if kind == "p-eagle":
        assert head.config.mask_token_id == 63, "the only id that never occurs"
    lines = metrics(tmp_path)
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    assert [line["step"] for line in lines if "validation_loss" in line] == [5, 10, 12]
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
    listed = [read_draft_vocabulary(tmp_path / name, head.config.vocab_size) for name in ("head", "best")]
    assert all(ids is not None and len(ids) for ids in listed), "a CPU drafts from the answers' frequent tokens"
    assert load_drafter(tmp_path / "best", kind=kind).config == head.config  # type: ignore[arg-type]
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["config"]["kind"] == kind
    assert facts["data"] == "listed"
    assert facts["versions"]["torch"] == torch.__version__


def test_the_best_head_is_kept_rather_than_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, weights_then = iter([2.0, 3.0, 1.5]), []  # of the validations at steps 5, 10 and 12
    real = trainer.validate

    def validate(drafter: Drafter, *more: Any) -> Any:
        weights_then.append({name: weight.clone() for name, weight in drafter.state_dict().items()})
        return replace(real(drafter, *more), without_loops=next(lengths))

    monkeypatch.setattr(trainer, "validate", validate)
    train_on(config(tmp_path), tiny_target(), listed_answers(40), say=quiet)
    best, last = (load_drafter(tmp_path / name).fc.weight for name in ("best", "head"))
    assert torch.equal(best, weights_then[1]["fc.weight"].to(best.dtype))
    assert torch.equal(last, weights_then[2]["fc.weight"].to(last.dtype))
    assert not torch.equal(best, last)


@pytest.mark.parametrize("loss", ["soft", "hard"])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_head_overfits_a_few_answers(tmp_path: Path, kind: str, loss: str) -> None:
    target = tiny_target()
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(4):  # the target's own greedy answers
        ids = torch.from_numpy(rng.integers(3, 63, (1, 6)))
        full = target.model.generate(ids, max_new_tokens=14, do_sample=False, eos_token_id=None)[0].numpy()
        examples.append(ListedExample(full.astype(np.int32), np.arange(20) >= 6))
    settings = config(
        tmp_path, kind=kind, loss=loss, max_steps=250, lr=2e-2, keep_rate=0.9, log_every=250, weight_decay=0.0,
        validation_documents=0, intermediate_size=64, warmup_steps=10, pack_length=96, packs_per_step=1,
        mask_token_id=None if kind == "eagle3" else 0,
    )  # fmt: skip
    train_on(settings, target, ListedAnswers(examples), say=quiet)
    accuracy = metrics(tmp_path)[-1]["accuracy"]
    # hard targets learn the greedy tokens themselves, soft ones the whole distribution, which is harder
    assert min(accuracy) > 0.9, accuracy


def test_clock_ends_a_run_with_its_decay_done(tmp_path: Path) -> None:
    settings = config(tmp_path, max_steps=None, max_minutes=0.03, log_every=1, min_lr_ratio=0.1, warmup_steps=1)
    result = train_on(settings, tiny_target(), listed_answers(40), say=quiet)
    assert result is not None
    assert result.finished
    rates = [line["lr"] for line in metrics(tmp_path) if "lr" in line]
    assert rates[-1] < 0.3 * settings.lr
    assert all(a >= b for a, b in itertools.pairwise(rates))


@pytest.mark.parametrize(("documents", "says"), [(9, "validation: none"), (40, "validation: 4 documents; 64 were")])
def test_too_few_documents_to_hold_out_are_told(tmp_path: Path, documents: int, says: str) -> None:
    said: list[str] = []
    train_on(
        config(tmp_path, max_steps=1, validation_documents=64),
        tiny_target(),
        listed_answers(documents),
        say=said.append,
    )
    assert any(line.startswith(says) for line in said)
    assert json.loads((tmp_path / "run.json").read_text())["versions"]["peagle"] == peagle.__version__


def test_reduced_vocabulary_and_own_embeddings(tmp_path: Path) -> None:
    said: list[str] = []
    settings = config(
        tmp_path, draft_vocab_size=40, loss="hard", train_embeddings=True, train_lm_head=True, max_steps=3
    )
    train_on(settings, tiny_target(), listed_answers(40), say=said.append)
    assert any("draft vocabulary: 40 of 64 ids" in line for line in said)
    head = load_drafter(tmp_path / "head")
    assert head.config.draft_vocab_size == 40
    assert head.lm_head is not None
    assert head.embed_tokens is not None


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_bfloat16_compute_follows_float32(tmp_path: Path, kind: str) -> None:
    target, answers = tiny_target(), listed_answers(40)
    losses = {}
    for dtype in ("float32", "bfloat16"):
        train_on(config(tmp_path / dtype, kind=kind, dtype=dtype, chunk_size=24), target, answers, say=quiet)
        losses[dtype] = [line["loss"] for line in metrics(tmp_path / dtype) if "loss" in line]
    assert losses["bfloat16"] == pytest.approx(losses["float32"], rel=0.05)
    assert losses["bfloat16"] != losses["float32"]


def test_flex_on_a_cpu_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="attention: got 'flex'"):
        train_on(config(tmp_path, attention="flex"), tiny_target(), listed_answers(40), say=quiet)


def test_head_and_its_frequent_tokens_appear_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise InputError("output: no space")

    monkeypatch.setattr(weights, "write_draft_vocabulary", fail)
    with pytest.raises(InputError, match="no space"):
        train_on(config(tmp_path, validation_documents=0), tiny_target(), listed_answers(40), say=quiet)
    assert not [path.name for path in tmp_path.iterdir() if "head" in path.name]


@contextmanager
def limited_file_size(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes: a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_log_on_a_full_disk_names_the_output(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, 0, -1, tensorboard=False)
    with limited_file_size(300):
        with pytest.raises(InputError, match=r"output: .* cannot be logged to \(File too large\)"):
            log.write({"step": 1, "loss": 1.0, "accuracy": [0.1] * 400})
        log.close()


def test_a_plot_that_cannot_be_written_only_warns(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    line = {"step": 1, "loss": 1.0, "accuracy": [0.1]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    with limited_file_size(300), pytest.warns(UserWarning, match=r"curves.png cannot be drawn \(.*File too large"):
        assert plot_run(tmp_path) is None
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert plot_run(tmp_path) == tmp_path / "curves.png"
    (tmp_path / "metrics.jsonl").write_text("{")
    with pytest.warns(UserWarning, match="cannot be drawn"):
        assert plot_run(tmp_path) is None


def test_unwritable_output_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"output: .* cannot be written"):
        train_on(config(tmp_path / "file" / "run"), tiny_target(), listed_answers(40), say=quiet)
