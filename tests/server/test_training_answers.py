"""`peagle data generate --endpoint` against this project's own server: the rows of the engine in the process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from typer.testing import CliRunner

from peagle.cli.data import data_app
from peagle.data.answers import AnswerSettings
from peagle.data.dataset import AnswerDataset, open_dataset
from peagle.data.generate import GenerateJob, GeneratingTarget, generate
from peagle.data.self_prompts import SelfPromptGroup, SelfPromptSettings
from peagle.errors import InputError
from peagle.target import Target, load_target
from tests.conftest import EOS
from tests.engine.helpers import ASCII
from tests.server.conftest import Running, Start, script, tiny_engine

Rows = dict[tuple[str, float], tuple[list[int], list[bool], str, str]]


@pytest.fixture(scope="module")
def ending(target_folder: Any) -> Target:
    """A target that ends some of its answers and its user turns."""
    loaded = load_target(str(target_folder("llama")), device="cpu")
    with torch.no_grad():
        loaded.lm_head_weight[ASCII:EOS] = 0
        loaded.lm_head_weight[EOS] *= 2.0
        loaded.lm_head_weight[EOS + 1 :] = 0
    return loaded


@pytest.fixture(scope="module")
def running(start: Start, ending: Target) -> Running:
    return start(tiny_engine(ending))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    rows = [{"turns": [f"Tell me of ship {i}", "And then?"][: 1 + i % 2]} for i in range(12)]
    (tmp_path / "ships.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "ships.jsonl"


def over_http(running: Running, folder: Path, output: Path, *arguments: object) -> str:
    given = ["generate", folder, "-o", output, "--endpoint", running.url, "--max-tokens", 40, *arguments]
    result = CliRunner().invoke(data_app, [str(one) for one in given], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def in_process(target: Target, output: Path, **settings: Any) -> None:
    engine = tiny_engine(target)
    generate(
        GenerateJob(output=output, **settings),
        lambda: GeneratingTarget(
            engine, target.tokenizer, "tiny", target.vocab_size, engine.max_model_len, target.eos_token_ids
        ),
        lambda _: None,
    )


def rows(dataset: AnswerDataset) -> Rows:
    found = {}
    for i, example in enumerate(dataset):
        key = dataset.prompt_ids[i], round(float(dataset.temperatures[i]), 4)
        tokens, mask = example.input_ids.tolist(), example.answer_mask.tolist()
        found[key] = tokens, mask, dataset.finish_reasons[i], dataset.sources[i]
    return found


def test_the_same_rows_as_from_the_engine_in_the_process(
    running: Running, ending: Target, target_folder: Any, prompts: Path, tmp_path: Path
) -> None:
    said = over_http(
        *(running, target_folder("llama"), tmp_path / "http", "--prompts", prompts, "--concurrency", 5),
        *("--temperature", 0, "--temperature", 1, "--every-temperature", "--loop-limit", 32),
    )
    assert "it tells token ids" in said
    settings = AnswerSettings(temperatures=((0.0, 1.0), (1.0, 1.0)), every=True, max_tokens=40, loop_limit=32)
    in_process(ending, tmp_path / "here", prompts=(str(prompts),), answers=settings)
    http, here = open_dataset(tmp_path / "http"), open_dataset(tmp_path / "here")
    assert rows(http) == rows(here)
    assert len(http) == 24
    assert set(http.finish_reasons) >= {"stop", "length"}
    assert http.metadata["target"] == here.metadata["target"] | {"name": str(target_folder("llama"))}
    served_by = http.metadata["generation"][0]["served_by"]
    assert (served_by["model"], served_by["token_ids"]) == ("tiny", True)
    assert "served_by" not in here.metadata["generation"][0]
    running.settle()


def test_user_turns_are_written_through_the_endpoint(
    running: Running, ending: Target, target_folder: Any, tmp_path: Path
) -> None:
    turns = ("--self-temperature", 0.7, "--self-top-p", 0.9, "--self-max-tokens", 100, "--seed", 3)
    over_http(
        running,
        target_folder("llama"),
        tmp_path / "http",
        "--self-prompts",
        "4:openings=Say it now|Tell me of a ship|Name one old rope",
        *turns,
    )
    own = SelfPromptSettings(temperature=0.7, top_p=0.9, max_tokens=100, seed=3)
    in_process(
        *(ending, tmp_path / "here"),
        self_prompts=(SelfPromptGroup(4, openings=("Say it now", "Tell me of a ship", "Name one old rope")),),
        answers=AnswerSettings(max_tokens=40, seed=3),
        turns=own,
    )
    http, here = open_dataset(tmp_path / "http"), open_dataset(tmp_path / "here")
    assert len(http) == len(here) == 4
    assert set(http.sources) == {"self"}


def test_looping_answers_are_ended_at_the_server(
    start: Start, target: Target, target_folder: Any, prompts: Path, tmp_path: Path
) -> None:
    engine = tiny_engine(target, None)
    script(engine, [5, 6, 7])
    running = start(engine)
    folder, output = target_folder("llama"), tmp_path / "out"
    over_http(running, folder, output, "--prompts", prompts, "--loop-limit", 40, "--max-tokens", 150)
    dataset = open_dataset(output)
    assert set(dataset.finish_reasons) == {"loop"}
    assert set(dataset.answer_lengths.tolist()) == {64}
    running.settle()


def test_another_models_tokenizer_is_noticed(
    running: Running, target_folder: Any, prompts: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(target_folder("llama"), other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["e"], vocab["t"] = vocab["t"], vocab["e"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(InputError, match="not the target's"):
        over_http(running, other, tmp_path / "out", "--prompts", prompts)
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_not_served(running: Running, target_folder: Any, prompts: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="404: model: 'big' is not served here"):
        over_http(running, target_folder("llama"), tmp_path / "out", "--prompts", prompts, "--endpoint-model", "big")


def test_the_api_key_comes_from_the_environment(
    start: Start, target: Target, target_folder: Any, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = start(tiny_engine(target, None), api_keys=("secret",))
    assert httpx.get(f"{running.url}/v1/models").status_code == 401
    with pytest.raises(InputError, match="401"):
        over_http(running, target_folder("llama"), tmp_path / "out", "--prompts", prompts)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    over_http(running, target_folder("llama"), tmp_path / "out", "--prompts", f"{prompts}:limit=2", "--max-tokens", 4)
    assert len(open_dataset(tmp_path / "out")) == 2
