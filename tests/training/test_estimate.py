"""The dry run."""

from __future__ import annotations

from pathlib import Path

from peagle.training.trainer import train_on

from .helpers import listed_answers, tiny_target
from .test_trainer import config


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
