"""`peagle train` turns its flags into a TrainConfig."""

from __future__ import annotations

import json
from dataclasses import fields
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
        "--activation-checkpointing",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    config = called["config"]
    assert (config.target, config.data, config.output) == ("model", ("one", "two"), "run")
    assert (config.lr, config.layers, config.kind) == (1e-3, 1, "eagle3")
    assert (config.aux_layer_ids, config.chunk_size, config.tensorboard) == ((2, 15, 27), 2048, False)
    assert config.activation_checkpointing
    assert called["dry_run"]


def test_every_setting_has_a_flag() -> None:
    import inspect

    flags = set(inspect.signature(train).parameters) - {"config", "dry_run"}
    assert {f.name for f in fields(TrainConfig)} - flags == {"beta1", "beta2"}


def test_stopped_run_has_its_own_exit_code(called: dict[str, Any]) -> None:
    called["finished"] = False
    assert invoke("model", "data", "-o", "run").exit_code == 3


def test_a_file_may_serve_both_kinds(called: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("k_train = 6\nttt_steps = 5\ndecay_share = 0.2\n")
    for kind, depths in (("p-eagle", 6), ("eagle3", 5)):
        result = invoke("model", "data", "-o", "run", "--config", str(file), "--kind", kind)
        assert result.exit_code == 0, result.output
        assert called["config"].depths == depths


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('norm_output = "false"', "norm_output: got 'false', expected true or false"),
        ("tensorboard = 1", "tensorboard: got 1, expected true or false"),
        ("lr = true", "lr: got True, expected a number above 0"),
        ("keep_rate = true", "keep_rate: got True, expected 0 to 1"),
        ("ema_decay = true", "ema_decay: got True, expected a number between 0 and 1"),
        ('aux_layer_ids = "2,15,27"', "aux_layer_ids: got '2,15,27', expected a list of layer ids"),
        ("aux_layer_ids = [1, true]", "aux_layer_ids: got [1, True], expected a list of layer ids"),
        ("device = 3", "device: got 3, expected a text"),
        ("init = false", "init: got False, expected a text"),
        ("hidden_states = 1", "hidden_states: got 1, expected a text or none"),
    ],
)
def test_values_of_another_type_are_refused(called: dict[str, Any], tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(line + "\n")
    error = invoke("model", "data", "-o", "run", "--config", str(file)).exception
    assert isinstance(error, InputError)
    assert message in str(error)


@pytest.mark.parametrize(
    "name", [f.name for f in fields(TrainConfig) if "None" not in str(f.type) and f.name not in ("target", "output")]
)
def test_null_is_refused_where_none_means_nothing(called: dict[str, Any], tmp_path: Path, name: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(f'{{"{name}": null, "output": "run"}}')
    arguments = ("model",) if name == "data" else ("model", "data")
    error = invoke(*arguments, "--config", str(file)).exception
    assert isinstance(error, InputError)
    assert f"{name}: got None, expected " in str(error)
    assert "config" not in called


def test_null_is_none_where_that_is_the_default(called: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    names = [f.name for f in fields(TrainConfig) if "None" in str(f.type)]
    file.write_text(json.dumps(dict.fromkeys(names)))
    result = invoke("model", "data", "-o", "run", "--config", str(file))
    assert result.exit_code == 0, result.output
    assert {getattr(called["config"], name) for name in names} == {None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"hidden_states": ""}', "hidden_states: got '', expected a folder or none"),
        ('{"init": ""}', "init: missing"),
        ('{"weight_decay": Infinity}', "weight_decay: got inf, expected 0 to inf"),
        ('{"state_cache_gib": NaN}', "state_cache_gib: got nan"),
    ],
)
def test_values_that_say_nothing_are_refused(
    called: dict[str, Any], tmp_path: Path, content: str, message: str
) -> None:
    file = tmp_path / "run.json"
    file.write_text(content)
    error = invoke("model", "data", "-o", "run", "--config", str(file)).exception
    assert isinstance(error, InputError)
    assert message in str(error)


@pytest.mark.parametrize("data", ["5", "[5]", "{}"])
def test_data_of_another_type_is_refused(called: dict[str, Any], tmp_path: Path, data: str) -> None:
    file = tmp_path / "run.json"
    file.write_text(f'{{"data": {data}}}')
    error = invoke("model", "-o", "run", "--config", str(file)).exception
    assert isinstance(error, InputError)
    assert "data: got" in str(error)


def test_mistakes_are_input_errors(called: dict[str, Any]) -> None:
    eagle3, p_eagle = "only for --kind eagle3", "only for --kind p-eagle"
    for args, message in (
        (("model", "data", "-o", "run", "--ttt-steps", "5"), f"--ttt-steps: {eagle3}"),
        (("model", "data", "-o", "run", "--ttt-decay", "0.8"), f"--ttt-decay: {eagle3}"),
        (("model", "data", "-o", "run", "--kind", "eagle3", "--k-train", "8"), f"--k-train: {p_eagle}"),
        (("model", "data", "-o", "run", "--kind", "eagle3", "--keep-rate", "0.8"), f"--keep-rate: {p_eagle}"),
        (("model", "data", "-o", "run", "--kind", "eagle3", "--depth-decay", "1"), f"--depth-decay: {p_eagle}"),
        (("model", "data", "-o", "run", "--kind", "eagle3", "--mask-token-id", "1"), f"--mask-token-id: {p_eagle}"),
        (("model", "data", "-o", "run", "--decay-share", "0.3"), "--decay-share: only for --schedule wsd"),
        (("model", "data", "-o", "run", "--chunk-size", "big"), "chunk_size: got 'big'"),
        (("model", "data", "-o", "run", "--aux-layer-ids", "a"), "aux_layer_ids: got 'a'"),
        (("model", "-o", "run"), "data: missing"),
    ):
        error = invoke(*args).exception
        assert isinstance(error, InputError)
        assert message in str(error)
