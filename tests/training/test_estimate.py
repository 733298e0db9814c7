"""The dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.training.estimate import parameter_bytes
from peagle.training.trainer import train_on

from .helpers import listed_answers, tiny_target
from .test_trainer import config, quiet


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


def test_bytes_of_a_parameter() -> None:
    assert parameter_bytes(torch.bfloat16, 1) == 16
    assert parameter_bytes(torch.bfloat16, 8) == 2 + 4 + 12 / 8
    assert parameter_bytes(torch.float32, 2) == 4 + 4 + 6


@pytest.mark.parametrize(("limits", "left"), [({"max_steps": 12}, 7), ({"max_steps": None, "max_minutes": 1e-9}, 0)])
def test_dry_run_beside_a_run_says_what_is_left(tmp_path: Path, limits: dict[str, Any], left: int) -> None:
    train_on(config(tmp_path, max_steps=5), tiny_target(), listed_answers(40), say=quiet)
    said: list[str] = []
    train_on(config(tmp_path, **limits), tiny_target(), listed_answers(40), dry_run=True, say=said.append)
    (line,) = (line for line in said if line.startswith("time:"))
    assert f": {left} steps after the 5 that are done, " in line
