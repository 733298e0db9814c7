"""Runs that crash, are killed or stopped go on to the same losses; what must not be mixed is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter import load_drafter
from peagle.errors import InputError
from peagle.target import Target
from peagle.training import target_states, trainer
from peagle.training.checkpoints import checkpoint_folders, load_latest, save_checkpoint
from peagle.training.identity import full_identity, same_target, target_identity
from peagle.training.trainer import train_on

from .helpers import ListedAnswers, listed_answers, tiny_target
from .test_trainer import config, metrics, quiet


class Crash(Exception):
    pass


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resume_gives_the_same_losses(tmp_path: Path, optimizer: str) -> None:
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path / "whole", log_every=2, optimizer=optimizer), target, answers, say=quiet)
    part = config(tmp_path / "part", log_every=2, max_steps=12, save_every=5, optimizer=optimizer)
    # a crash: an exception out of the middle of a step, after the checkpoint of step 5
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


def test_chunks_and_slices_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path / "run", max_steps=3), target, answers, say=quiet)
    shutil.copytree(tmp_path / "run", tmp_path / "same")
    said: list[str] = []
    train_on(config(tmp_path / "same", max_steps=6), target, answers, say=said.append)
    assert not any("rounded differently" in line for line in said)
    train_on(config(tmp_path / "run", max_steps=6, chunk_size=16, loss_rows=32), target, answers, say=said.append)
    [line] = [line for line in said if "rounded differently" in line]
    assert "chunk_size" in line
    assert "-> 16" in line
    assert "loss_rows" in line
    assert "-> 32" in line
    losses = [[m["loss"] for m in metrics(tmp_path / name) if "loss" in m] for name in ("same", "run")]
    assert len(losses[0]) == 6
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    said.clear()
    train_on(config(tmp_path / "run", max_steps=7), target, answers, say=said.append)
    assert not any("rounded differently" in line for line in said), "auto keeps them"


def test_another_fine_tune_of_the_target_is_refused(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path, max_steps=2), target, answers, say=quiet)
    with torch.no_grad():
        target.layers[2].mlp.up_proj.weight.mul_(1.05)
    with pytest.raises(InputError, match=r"target: fingerprint (\w+)-\w+ -> \1-\w+[;)]"):
        train_on(config(tmp_path, max_steps=3), target, answers, say=quiet)


def test_a_target_is_recognised_without_its_layers_and_in_another_dtype() -> None:
    target = tiny_target()
    target.model.to(torch.bfloat16)
    of_all, without = full_identity(target), target_identity(target)
    assert of_all.startswith(f"{without}-")
    assert full_identity(Target(target.model.float(), None, "tiny", frozenset({2}))) == of_all
    assert same_target(of_all, of_all)
    assert same_target(of_all, without)  # a run of an earlier version
    assert same_target(without, of_all)
    other = full_identity(tiny_target(seed=9))
    assert not same_target(of_all, other)
    assert not same_target(without, other)


def test_a_run_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    """Its checkpoints have no look at the layers and no dtypes in them."""
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path, max_steps=2), target, answers, say=quiet)
    saved = load_latest(tmp_path / "checkpoints")
    assert saved is not None
    del saved["computed"]
    save_checkpoint(tmp_path / "checkpoints", 2, saved | {"target": target_identity(target)}, keep=1)
    with pytest.raises(InputError, match="dtype: 'auto' -> 'bfloat16'"):
        train_on(config(tmp_path, max_steps=3, dtype="bfloat16"), target, answers, say=quiet)
    result = train_on(config(tmp_path, max_steps=3), target, answers, say=quiet)
    assert result is not None
    assert result.steps == 3
    saved = load_latest(tmp_path / "checkpoints")
    assert saved is not None
    assert saved["target"] == full_identity(target)


def test_what_a_run_computes_in_stays(tmp_path: Path) -> None:
    """`auto` is bfloat16 on a GPU and float32 on a CPU."""
    target, answers = tiny_target(), listed_answers(40)
    target.model.to(torch.bfloat16)
    train_on(config(tmp_path, max_steps=2, dtype="bfloat16"), target, answers, say=quiet)
    mixed = "dtype: head in bfloat16, target in bfloat16 -> head in float32, target in bfloat16"
    with pytest.raises(InputError, match=mixed):
        train_on(config(tmp_path, max_steps=3), target, answers, say=quiet)
    target.model.float()
    with pytest.raises(InputError, match="-> head in bfloat16, target in float32"):
        train_on(config(tmp_path, max_steps=3, dtype="bfloat16"), target, answers, say=quiet)
    with pytest.raises(InputError, match="dtype: head in bfloat16"):
        train_on(config(tmp_path, max_steps=3), target, answers, say=quiet)


def test_auto_and_the_dtype_it_stands_for_are_one(tmp_path: Path) -> None:
    target, answers = tiny_target(), listed_answers(40)
    train_on(config(tmp_path, max_steps=2), target, answers, say=quiet)
    result = train_on(config(tmp_path, max_steps=3, dtype="float32"), target, answers, say=quiet)
    assert result is not None
    assert result.steps == 3


def test_a_damaged_newer_checkpoint_does_not_push_out_the_one_just_written(tmp_path: Path) -> None:
    for step in (10, 20):
        save_checkpoint(tmp_path, step, {"step": step}, keep=2)
    (tmp_path / "step-00000020" / "state.pt").write_bytes(b"torn")
    save_checkpoint(tmp_path, 15, {"step": 15}, keep=1)
    with pytest.warns(UserWarning, match="step-00000020 cannot be read and is passed over"):
        saved = load_latest(tmp_path)
    assert saved is not None
    assert saved["step"] == 15


def test_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save_checkpoint(tmp_path, step, {"step": step}, keep=2)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-00000005", "step-00000004"]


def test_a_longer_run_keeps_the_better_head_and_its_last_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([3.0, 1.5])
    real = trainer.validate

    def validate(*more: Any) -> Any:
        return replace(real(*more), without_loops=next(found))

    monkeypatch.setattr(trainer, "validate", validate)
    run = config(tmp_path / "run", max_steps=4, validate_every=100)
    train_on(run, tiny_target(), listed_answers(40), say=quiet)
    best = (tmp_path / "run" / "best" / "model.safetensors").read_bytes()
    run.max_steps = 8
    train_on(run, tiny_target(), listed_answers(40), say=quiet)
    assert (tmp_path / "run" / "best" / "model.safetensors").read_bytes() == best
    lines = [line for line in metrics(tmp_path / "run") if "validation_loss" in line]
    assert [line["step"] for line in lines] == [4, 8]
