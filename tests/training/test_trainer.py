"""Whole runs on a tiny target: learning, resuming to the same losses, refusing what must not be mixed."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from peagle.config import TrainConfig
from peagle.drafter import load_drafter
from peagle.errors import InputError
from peagle.training.learning_rate import learning_rate_factor
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
    assert load_drafter(tmp_path / "best", kind=kind).config == head.config  # type: ignore[arg-type]
    facts = json.loads((tmp_path / "run.json").read_text())
    assert facts["config"]["kind"] == kind
    assert facts["data"] == "listed"
    assert facts["versions"]["torch"] == torch.__version__


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


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_gives_the_same_losses(tmp_path: Path, optimizer: str) -> None:
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path / "whole", log_every=2, optimizer=optimizer), target, answers, say=quiet)
    part = config(tmp_path / "part", log_every=2, max_steps=12, save_every=5, optimizer=optimizer)
    # a crash: an exception out of the middle of a step, after the checkpoint of step 5
    from peagle.training import target_states

    class Crash(Exception):
        pass

    real, calls = target_states.encode_packs, []

    def crashing(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 10:  # eight steps and a validation of two packs
            raise Crash
        return real(*args)

    target_states.encode_packs = crashing
    try:
        with pytest.raises(Crash):
            train_on(part, target, answers, say=quiet)
    finally:
        target_states.encode_packs = real
    assert metrics(tmp_path / "part")[-1]["step"] == 8
    result = train_on(part, target, answers, say=quiet)
    assert result is not None
    assert metrics(tmp_path / "part") == metrics(tmp_path / "whole")
    whole, again = (load_drafter(tmp_path / name / "head").state_dict() for name in ("whole", "part"))
    assert all(torch.equal(whole[name], again[name]) for name in whole)


CHILD = """
import sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from training.helpers import listed_answers, tiny_target
from training.test_trainer import config
from pathlib import Path
from peagle.training.trainer import train_on
settings = config(Path({output!r}), max_steps={steps}, save_every=3)
result = train_on(settings, tiny_target(), listed_answers(40))
sys.exit(0 if result.finished else 3)
"""


def start(output: Path, steps: int) -> subprocess.Popen[bytes]:
    here = Path(__file__).resolve().parents[1]
    code = textwrap.dedent(CHILD).format(paths=[str(here), str(here.parent / "src")], output=str(output), steps=steps)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=dict(os.environ)
    )


def wait_for_step(output: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "the run ended before it could be stopped"
        file = output / "metrics.jsonl"
        if file.exists() and len(file.read_text().splitlines()) > step:
            return
        time.sleep(0.02)
    raise AssertionError("the run did not get going")


def test_killed_run_resumes_to_the_same_losses(tmp_path: Path) -> None:
    steps = 25
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other process: sums depend on it
    train_on(config(tmp_path / "whole", max_steps=steps, save_every=3), tiny_target(), listed_answers(40), say=quiet)
    torch.set_num_threads(threads)
    killed = start(tmp_path / "killed", steps)
    wait_for_step(tmp_path / "killed", 10, killed)
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert not (tmp_path / "killed" / "head").exists()
    assert start(tmp_path / "killed", steps).wait(300) == 0
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")


def test_sigterm_leaves_a_checkpoint_of_the_last_step(tmp_path: Path) -> None:
    process = start(tmp_path / "run", 100000)
    wait_for_step(tmp_path / "run", 4, process)
    process.terminate()
    assert process.wait(60) == 3
    last = [line["step"] for line in metrics(tmp_path / "run") if "loss" in line][-1]
    assert (tmp_path / "run" / "checkpoints" / f"step-{last:08d}").is_dir()
    assert not (tmp_path / "run" / "head").exists()


def test_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path, save_every=4, max_steps=8), target, answers, say=quiet)
    newest = sorted((tmp_path / "checkpoints").iterdir())[-1] / "state.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    said: list[str] = []
    with pytest.warns(UserWarning, match="cannot be read"):
        train_on(config(tmp_path, save_every=4, max_steps=10), target, answers, say=said.append)
    assert "resumed at step 4" in said


def test_resume_refuses_other_settings_and_other_data(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path, max_steps=2), target, answers, say=quiet)
    with pytest.raises(InputError, match=r"lr: 0.003 -> 0.001; k_train: 4 -> 5|k_train: 4 -> 5; lr: 0.003 -> 0.001"):
        train_on(config(tmp_path, max_steps=2, lr=1e-3, k_train=5), target, answers, say=quiet)
    with pytest.raises(InputError, match="data: fingerprint"):
        train_on(config(tmp_path), target, ListedAnswers(answers.examples, "other"), say=quiet)
    with pytest.raises(InputError, match="target: fingerprint"):
        train_on(config(tmp_path), tiny_target(seed=9), answers, say=quiet)
    with pytest.raises(InputError, match="holds a run already"):
        train_on(config(tmp_path, resume="never"), target, answers, say=quiet)
    result = train_on(config(tmp_path, max_steps=3), target, answers, say=quiet)  # a limit may change
    assert result is not None
    assert result.steps == 3


def test_clock_ends_a_run_with_its_decay_done(tmp_path: Path) -> None:
    settings = config(tmp_path, max_steps=None, max_minutes=0.03, log_every=1, min_lr_ratio=0.1, warmup_steps=1)
    result = train_on(settings, tiny_target(), listed_answers(40), say=quiet)
    assert result is not None
    assert result.finished
    rates = [line["lr"] for line in metrics(tmp_path) if "lr" in line]
    assert rates[-1] < 0.3 * settings.lr
    assert all(a >= b for a, b in itertools.pairwise(rates))


def test_learning_rate() -> None:
    assert learning_rate_factor(0, 0.0, 10, 0.1) == pytest.approx(0.1)
    assert learning_rate_factor(9, 0.0, 10, 0.1) == pytest.approx(1.0)
    assert learning_rate_factor(50, 0.5, 10, 0.1) == pytest.approx(0.55)
    assert learning_rate_factor(99, 1.0, 10, 0.1) == pytest.approx(0.1)
    assert learning_rate_factor(0, 0.0, 0, 0.1) == pytest.approx(1.0)


def test_dry_run_says_and_writes_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    assert train_on(config(tmp_path / "run"), tiny_target(), listed_answers(40), dry_run=True, say=said.append) is None
    assert not (tmp_path / "run").exists()
    text = "\n".join(said)
    assert "parameters to train" in text
    assert "12 steps" in text
    assert "memory: peak" in text
    assert "time:" in text
    assert "tokens" in text


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


def test_unwritable_output_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"output: .* cannot be written"):
        train_on(config(tmp_path / "file" / "run"), tiny_target(), listed_answers(40), say=quiet)
