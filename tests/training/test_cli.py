"""`peagle train` turns its flags into a TrainConfig."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from peagle.cli.train import train
from peagle.config.training import TrainConfig
from peagle.errors import InputError
from peagle.training import trainer


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def fake(config: TrainConfig, dry_run: bool = False) -> trainer.TrainResult:
        seen.update(config=config, dry_run=dry_run)
        return trainer.TrainResult(1, seen.get("finished", True), None, None)

    monkeypatch.setattr(trainer, "train", fake)
    return seen


def invoke(*args: str) -> Any:
    app = typer.Typer()
    app.command()(train)
    return CliRunner().invoke(app, list(args))


def test_flags_reach_the_config(called: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"lr": 0.001, "layers": 4}')
    result = invoke(
        "model", "one", "two", "--output", "run", "--config", str(file), "--layers", "1", "--kind", "eagle3",
        "--aux-layer-ids", "2,15,27", "--chunk-size", "2048", "--no-tensorboard", "--dry-run",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    config = called["config"]
    assert (config.target, config.data, config.output) == ("model", ("one", "two"), "run")
    assert (config.lr, config.layers, config.kind) == (1e-3, 1, "eagle3")
    assert (config.aux_layer_ids, config.chunk_size, config.tensorboard) == ((2, 15, 27), 2048, False)
    assert called["dry_run"]


def test_every_setting_has_a_flag() -> None:
    import inspect
    from dataclasses import fields

    flags = set(inspect.signature(train).parameters) - {"config", "dry_run"}
    assert {f.name for f in fields(TrainConfig)} - flags == {"beta1", "beta2"}


def test_stopped_run_has_its_own_exit_code(called: dict[str, Any]) -> None:
    called["finished"] = False
    assert invoke("model", "data", "-o", "run").exit_code == 3


def test_mistakes_are_input_errors(called: dict[str, Any]) -> None:
    for args, message in (
        (("model", "data", "-o", "run", "--chunk-size", "big"), "chunk_size: got 'big'"),
        (("model", "data", "-o", "run", "--aux-layer-ids", "a"), "aux_layer_ids: got 'a'"),
        (("model", "-o", "run"), "data: missing"),
    ):
        error = invoke(*args).exception
        assert isinstance(error, InputError)
        assert message in str(error)
