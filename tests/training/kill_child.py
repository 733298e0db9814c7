"""Runs that are killed and started again, for test_kill: `python -m training.kill_child FOLDER KILLS SEED`.

One process imports everything and forks each life of a run, which costs milliseconds instead of a start of Python.
"""

from __future__ import annotations

import io
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from peagle.training.trainer import train_on

from .helpers import listed_answers, tiny_target
from .test_trainer import config, quiet

STEPS = 12
EVENTS = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "tempfile.mkdtemp")


def kill_at_operation(folder: Path, number: int) -> None:
    """Die just before the `number`-th operation on files of the run's folder."""
    left = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS and isinstance(args[0], str | bytes | os.PathLike):
            left[0] -= os.fsdecode(args[0]).startswith(str(folder))
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_within_checkpoint(number: int, share: float) -> None:
    """Die when a share of the `number`-th checkpoint's bytes is written."""
    real, left = torch.save, [number]

    def save(state: Any, file: Any) -> None:
        left[0] -= 1
        if left[0]:
            real(state, file)
            return
        whole = io.BytesIO()
        real(state, whole)
        file.write(whole.getvalue()[: int(share * whole.tell())])
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


def live(folder: Path, way: str, rng: random.Random, longest: float) -> bool:
    """One life of a run; whether it was killed (False: it reached its end)."""
    number, share, seconds = rng.randrange(1, 40), rng.random(), longest * rng.random()
    child = os.fork()
    if not child:
        code = 1
        try:
            if way == "operation":
                kill_at_operation(folder, number)
            elif way == "checkpoint":
                kill_within_checkpoint(1 + number % 3, share)
            # every step writes a checkpoint
            train_on(config(folder, max_steps=STEPS, save_every=1), tiny_target(), listed_answers(40), say=quiet)
            code = 0
        finally:
            os._exit(code)
    if way == "moment":
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, "a life ended with an error"
    return False


def main(folder: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    began = time.monotonic()
    assert not live(folder / "whole", "", rng, 0.0)
    longest = 0.6 * (time.monotonic() - began)
    done: dict[str, int] = {}
    run = 0
    while sum(done.values()) < kills:
        way = ("moment", "checkpoint", "operation")[sum(done.values()) % 3]
        if live(folder / f"run-{run}", way, rng, longest):
            done[way] = done.get(way, 0) + 1
        else:
            run += 1
    live(folder / f"run-{run}", "", rng, 0.0)
    print(json.dumps({"kills": done, "runs": run + 1}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
