import json
import random
from dataclasses import replace

import pytest

from peagle.data.answers import AnswerSettings
from peagle.data.dataset import open_dataset
from peagle.data.generate import GenerateJob, GeneratingTarget, generate, parse_part
from peagle.data.self_prompts import SelfPromptGroup
from peagle.errors import InputError
from tests.data.conftest import END, FakeEngine

EVAL = "Explain in detail how a lighthouse lens was ground and polished by hand."


@pytest.fixture
def files(tmp_path):
    rows = [{"prompt": f"Tell me story number {i} about the sea."} for i in range(30)]
    rows.insert(3, {"prompt": f"Please do this: {EVAL.lower()}"})
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "eval.jsonl").write_text(json.dumps({"turns": [EVAL]}) + "\n")
    return tmp_path


def target(chat, stop_after=None):
    opening = chat.first_opening()

    def reply(prompt, params):
        rng = random.Random(params.seed)
        if prompt != opening:
            return [*chat.encode(" A story."), END]
        words = ["ship", "rope", "sail", "wind", "gull", "storm", "wave", "port", "crew"]
        text = EVAL if rng.random() < 0.2 else "Describe the " + " ".join(rng.choice(words) for _ in range(7)) + "."
        return [*chat.encode(text), END]

    engine = FakeEngine(reply, stop_after=stop_after)
    return engine, lambda: GeneratingTarget(engine, chat.tokenizer, "tiny", 300, 400, frozenset([END]), window=8)


def job(files, part=(1, 1), **kwargs):
    return GenerateJob(
        output=files / "answers",
        prompts=(str(files / "train.jsonl"),),
        self_prompts=(SelfPromptGroup(10),),
        exclude=(str(files / "eval.jsonl"),),
        part=part,
        answers=AnswerSettings(max_tokens=50),
        **kwargs,
    )


def test_prompts_of_both_kinds_without_the_evaluation_prompt(files, chat):
    said = []
    generate(job(files), target(chat)[1], said.append)
    dataset = open_dataset(files / "answers")
    assert len(dataset) == 40
    assert dataset.sources.count("self") == 10
    assert not any("lighthouse" in chat.tokenizer.decode(example.input_ids) for example in dataset)
    assert "dropped: train: 1 prompt(s) too close to eval (13-gram)" in said
    assert any("too close to an evaluation prompt" in line for line in said)
    assert dataset.metadata["counts"] == {"examples": 40, "shards": 1}
    assert dataset.metadata["generation"][0]["exclude"] == ["eval.jsonl"]


def test_parts_fill_one_folder_without_overlap(files, chat):
    for number in (1, 2, 3):
        generate(job(files, part=(number, 3)), target(chat)[1], lambda _: None)
    dataset = open_dataset(files / "answers")
    assert len(dataset) >= 38, "two parts may write the same prompt themselves"
    assert dataset.sources.count("train") == 30
    names = {path.name for path in dataset.shards}
    assert names == {f"answers-{number}of3-00000.parquet" for number in (1, 2, 3)}
    assert len(dataset.metadata["generation"]) == 1


@pytest.mark.parametrize("stop_after", [4, 25, 60])
def test_killed_and_run_again(files, chat, stop_after):
    with pytest.raises(KeyboardInterrupt):
        generate(job(files), target(chat, stop_after)[1], lambda _: None)
    generate(job(files), target(chat)[1], lambda _: None)
    dataset = open_dataset(files / "answers")
    assert len(dataset) == len(set(dataset.prompt_ids)) == 40
    engine, open_target = target(chat)
    generate(job(files), open_target, lambda _: None)
    assert engine.seen == [], "nothing is left to do"


def test_other_settings_in_the_same_folder_are_said(files, chat):
    first = job(files)
    generate(first, target(chat)[1], lambda _: None)
    said = []
    generate(first, target(chat)[1], said.append)
    assert not any("other settings" in line for line in said)
    changed = replace(first, answers=replace(first.answers, max_tokens=3))
    generate(changed, target(chat)[1], said.append)
    [line] = [line for line in said if "other settings" in line]
    assert line.endswith(f"(max_tokens: {first.answers.max_tokens} -> 3)")


def test_errors_come_before_the_model_is_loaded(files):
    def never():
        raise AssertionError("loaded")

    with pytest.raises(InputError, match="nothing to answer"):
        generate(GenerateJob(output=files / "x"), never, print)
    with pytest.raises(InputError, match="no such file"):
        generate(GenerateJob(output=files / "x", prompts=("absent.jsonl",)), never, print)
    with pytest.raises(InputError, match="no such file"):
        generate(
            GenerateJob(output=files / "x", prompts=(str(files / "train.jsonl"),), exclude=("no.jsonl",)), never, print
        )
    assert not (files / "x").exists()


def test_parts():
    assert parse_part("2/3") == (2, 3)
    for bad in ("0/3", "4/3", "x/3", "3", "1/0"):
        with pytest.raises(InputError, match="--shard"):
            parse_part(bad)
