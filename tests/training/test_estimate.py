"""The dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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


@pytest.mark.parametrize(("limits", "left"), [({"max_steps": 12}, 7), ({"max_steps": None, "max_minutes": 1e-9}, 0)])
def test_dry_run_beside_a_run_says_what_is_left(tmp_path: Path, limits: dict[str, Any], left: int) -> None:
    train_on(config(tmp_path, max_steps=5), tiny_target(), listed_answers(40), say=quiet)
    said: list[str] = []
    train_on(config(tmp_path, **limits), tiny_target(), listed_answers(40), dry_run=True, say=said.append)
    (line,) = (line for line in said if line.startswith("time:"))
    assert f": {left} steps after the 5 that are done, " in line
