"""What is refused while a run is prepared, dry or not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from peagle.errors import InputError
from peagle.training.trainer import train_on

from .helpers import listed_answers, tiny_target
from .test_trainer import config, quiet


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_head_that_cannot_reach_its_training_documents(tmp_path: Path, dry_run: bool) -> None:
    longest = max(len(example.input_ids) for example in listed_answers(30).examples)
    settings = config(tmp_path / "run", max_position_embeddings=longest - 1)
    expected = rf"max_position_embeddings: .*have {longest - 1}, expected at least {longest}, .*--pack-length"
    with pytest.raises(InputError, match=expected):
        train_on(settings, tiny_target(), listed_answers(30), dry_run=dry_run, say=quiet)
    train_on(replace(settings, max_position_embeddings=longest), tiny_target(), listed_answers(30), dry_run, quiet)


@pytest.mark.parametrize("dry_run", [False, True])
def test_an_output_that_is_a_file(tmp_path: Path, dry_run: bool) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(InputError, match=r"output: .*run is a file, expected a folder"):
        train_on(config(tmp_path / "run"), tiny_target(), listed_answers(30), dry_run=dry_run, say=quiet)


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("name", ["head", "best"])
def test_an_output_that_holds_another_model(tmp_path: Path, name: str, dry_run: bool) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(InputError, match=f"{name} is not a head's folder, it is not replaced"):
        train_on(config(tmp_path), tiny_target(), listed_answers(30), dry_run=dry_run, say=quiet)
