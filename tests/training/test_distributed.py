"""Two gloo processes on the CPU against one with the same global batch, and a run that changes the number."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.training.trainer import train_on

from .helpers import listed_answers, tiny_target
from .test_trainer import config, metrics, quiet

CHILD = """
import os, signal, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
from training.helpers import listed_answers, tiny_target
from training.test_trainer import config
from pathlib import Path
from peagle.training import trainer
from peagle.training.distributed import join, leave
from peagle.training.trainer import train_on
world, _ = join("cpu")
real = trainer.train_step
def step(plan, weights, target_states, state, *more, **named):
    if world.first and state.step == {killed_at}:
        os.kill(os.getpid(), signal.SIGKILL)
    if not world.first and state.step == {stopped_at}:
        os.kill(os.getpid(), signal.SIGTERM)
    return real(plan, weights, target_states, state, *more, **named)
trainer.train_step = step
result = train_on(config(Path({output!r}), **{settings!r}), tiny_target(), listed_answers(40), world=world)
leave()
# a thread of gloo's that is left may abort the process while the interpreter ends
names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
if left := [name for name in names if "gloo" in name]:
    sys.exit(f"threads left: {{left}}")
sys.exit(0 if result.finished else 3)
"""


def start(
    processes: int,
    output: Path,
    settings: dict[str, Any],
    killed_at: int = -1,
    stopped_at: int = -1,
    folders: Sequence[str] = (),
) -> list[subprocess.Popen[bytes]]:
    """The processes of a run; killed_at: steps done when the first one is killed, stopped_at: when the others get
    SIGTERM; folders: beside `output`, one for each process instead of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here = Path(__file__).resolve().parents[1]
    children = []
    for rank in range(processes):
        of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        folder = output.with_name(folders[rank]) if folders else output
        code = textwrap.dedent(CHILD).format(
            paths=[str(here), str(here.parent / "src")], output=str(folder), settings=settings, killed_at=killed_at,
            stopped_at=stopped_at,
        )  # fmt: skip
        env = dict(os.environ) | of_rank | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children.append(
            subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=env)
        )
    return children


def run_on(processes: int, output: Path, settings: dict[str, Any]) -> None:
    for child in start(processes, output, settings):
        error = child.communicate(timeout=300)[1]
        assert child.returncode == 0, error.decode()[-3000:]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    return torch.load(newest / "state.pt", weights_only=True)["drafter"]


# Adam divides gradients by their size, so where they are next to nothing its step keeps their rounding: differences
# grow with the learning rate (1.4e-6 in 0.02 % of the weights at 4e-4), which is therefore small in these tests
def assert_same(folder: Path, other: Path) -> None:
    ones, others = metrics(folder), metrics(other)
    assert [line["step"] for line in ones] == [line["step"] for line in others]
    for a, b in zip(ones, others, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name] == pytest.approx(b[name], rel=1e-6, abs=1e-6), name
    mine, theirs = weights(folder), weights(other)
    for name in mine:
        assert torch.allclose(mine[name], theirs[name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_two_processes_train_as_one(tmp_path: Path, kind: str) -> None:
    # three packs a step, so that one process has two and the other one; the epoch's last step leaves one without any
    settings: dict[str, Any] = {
        "kind": kind, "max_steps": 20, "packs_per_step": 3, "chunk_size": 24, "lr": 2e-4, "log_every": 3,
    }  # fmt: skip
    train_on(config(tmp_path / "one", **settings), tiny_target(), listed_answers(40), say=quiet)
    run_on(2, tmp_path / "two", settings)
    assert_same(tmp_path / "one", tmp_path / "two")
    assert (tmp_path / "two" / "head" / "model.safetensors").is_file()


def test_run_of_two_goes_on_as_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 20, "packs_per_step": 2, "lr": 2e-4, "log_every": 4}
    train_on(config(tmp_path / "one", **settings), tiny_target(), listed_answers(40), say=quiet)
    run_on(2, tmp_path / "two", settings | {"save_every": 7})
    for newest in sorted((tmp_path / "two" / "checkpoints").iterdir())[1:]:
        (newest / "state.pt").unlink()
        newest.rmdir()
    assert [p.name for p in (tmp_path / "two" / "checkpoints").iterdir()] == ["step-00000014"]
    result = train_on(config(tmp_path / "two", **settings), tiny_target(), listed_answers(40), say=quiet)
    assert result is not None
    assert result.steps == 20
    assert_same(tmp_path / "one", tmp_path / "two")


def test_killed_run_of_two_goes_on_as_two(tmp_path: Path) -> None:
    """From a checkpoint between two lines of the log, whose statistics must be counted once."""
    settings: dict[str, Any] = {"max_steps": 16, "packs_per_step": 2, "lr": 2e-4, "log_every": 4, "save_every": 3}
    train_on(config(tmp_path / "one", **settings), tiny_target(), listed_answers(40), say=quiet)
    killed, other = start(2, tmp_path / "two", settings, killed_at=10)
    assert killed.wait(120) == -signal.SIGKILL
    other.kill()
    other.communicate(timeout=60)
    newest = sorted(p.name for p in (tmp_path / "two" / "checkpoints").glob("step-*"))[-1]
    assert newest == "step-00000009"
    run_on(2, tmp_path / "two", settings)
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_step_is_given_up_when_one_is_told_to_stop(tmp_path: Path, parallel: str) -> None:
    settings: dict[str, Any] = {
        "max_steps": 12, "packs_per_step": 2, "chunk_size": 24, "lr": 2e-4, "log_every": 4, "parallel": parallel,
    }  # fmt: skip
    run_on(2, tmp_path / "whole", settings)
    for child in start(2, tmp_path / "parts", settings, stopped_at=5):  # within the sixth step
        error = child.communicate(timeout=120)[1]
        assert child.returncode == 3, error.decode()[-3000:]
    (checkpoint,) = (tmp_path / "parts" / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000005"
    run_on(2, tmp_path / "parts", settings)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    whole, parts = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert all(torch.equal(parts[name], weight) for name, weight in whole.items())


def test_processes_that_see_other_checkpoints_do_not_go_on(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_steps": 8, "packs_per_step": 2, "save_every": 4, "keep_checkpoints": 10}
    run_on(2, tmp_path / "run", settings)
    shutil.copytree(tmp_path / "run", tmp_path / "stale")
    shutil.rmtree(tmp_path / "stale" / "checkpoints" / "step-00000008")
    for child in start(2, tmp_path / "RANK", settings | {"max_steps": 12}, folders=("run", "stale")):
        error = child.communicate(timeout=120)[1].decode()
        assert child.returncode == 1
        assert "expected one folder that every process sees as it is now" in error
        assert "from 4 to 8" in error
