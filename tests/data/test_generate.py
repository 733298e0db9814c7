import json
import os
import random
import re
import signal
from dataclasses import replace

import pytest
import typer

from peagle.cli.ending_signals import ends_on_signals
from peagle.data.answers import AnswerSettings
from peagle.data.dataset import open_dataset
from peagle.data.generate import GeneratingTarget, generate
from peagle.data.job import GenerateJob, parse_part
from peagle.data.prompts import make_prompt
from peagle.data.self_prompts import SelfPromptGroup, SelfPromptSettings
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


def test_a_run_that_came_to_its_limit_goes_on_with_other_attempts(files, chat):
    """One attempt in twenty is kept. A rerun that made those of the first run again would find duplicates alone."""

    def reply(prompt, params):
        if prompt != chat.first_opening():
            return [*chat.encode(" A story."), END]
        good = params.seed % 20 == 0
        return [*chat.encode(f"Describe the ship of captain {params.seed} now." if good else "No"), END]

    made = GeneratingTarget(FakeEngine(reply), chat.tokenizer, "tiny", 300, 400, frozenset([END]), window=8)
    plain = replace(job(files), prompts=(), self_prompts=(SelfPromptGroup(5),))
    with pytest.raises(InputError, match="only 4 acceptable prompts in 104 attempts"):
        generate(plain, lambda: made, lambda _: None)
    [path] = (files / "answers").glob("self-prompts-*")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row.get("attempts") for row in rows] == [None, None, None, 104]
    generate(plain, lambda: made, lambda _: None)
    assert len(open_dataset(files / "answers")) == 5


@pytest.mark.parametrize(("what", "request_number"), [("prompts", 9), ("answers", 35)])
def test_sigterm_writes_what_is_there_and_ends_with_its_status(files, chat, what, request_number):
    engine, open_target = target(chat)
    ordinary = engine.reply

    def reply(prompt, params):
        if len(engine.seen) == request_number:
            assert (prompt == chat.first_opening()) == (what == "prompts")
            os.kill(os.getpid(), signal.SIGTERM)
        return ordinary(prompt, params)

    engine.reply = reply
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(typer.Exit) as ended, ends_on_signals():
        generate(job(files), open_target, lambda _: None)
    assert ended.value.exit_code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    [prompts] = (files / "answers").glob("self-prompts-*")
    assert 0 < len(prompts.read_text().splitlines()) <= 10
    if what == "answers":
        assert 0 < len(open_dataset(files / "answers")) < 40
    generate(job(files), target(chat)[1], lambda _: None)
    assert len(open_dataset(files / "answers")) == 40


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


def test_template_settings_on_one_side_only_are_said(files, chat):
    for before, now, change in (
        ({}, {"enable_thinking": False}, "enable_thinking: not given -> False"),
        ({"enable_thinking": False}, {}, "enable_thinking: False -> not given"),
        ({"depth": 1}, {"depth": 2}, "depth: 1 -> 2"),
    ):
        folder = files / change.partition(":")[2].replace(" ", "")
        said = []
        for kwargs in (before, now):
            plain = replace(job(files, template_kwargs=kwargs), output=folder, self_prompts=())
            generate(plain, target(chat)[1], said.append)
        assert [line.partition(" stays as it is ")[2] for line in said if "other settings" in line] == [f"({change})"]


def test_a_prompt_that_two_sources_bring_is_answered_once(files, chat):
    row = {"prompt": "Describe the ship rope sail wind gull storm wave."}
    (files / "chat.jsonl").write_text(json.dumps(row) + "\n")
    engine = FakeEngine(
        lambda prompt, _: [*chat.encode(row["prompt"] if prompt == chat.first_opening() else " A."), END]
    )
    made = GeneratingTarget(engine, chat.tokenizer, "tiny", 300, 400, frozenset([END]), window=8)
    both = replace(job(files), prompts=(str(files / "chat.jsonl"),), self_prompts=(SelfPromptGroup(1, "chat"),))
    generate(both, lambda: made, lambda _: None)
    assert open_dataset(files / "answers").prompt_ids == [make_prompt("chat", [row["prompt"]]).prompt_id]


def test_prompts_longer_than_the_model_are_named(files, chat):
    long = "Tell me more about the sea. " * 20
    rows = [{"prompt": f"{long}{i}"} for i in range(7)]
    (files / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    some = replace(job(files), prompts=(str(files / "train.jsonl"), str(files / "long.jsonl")), self_prompts=())
    said = []
    generate(some, target(chat)[1], said.append)
    [line] = [line for line in said if line.startswith("warning: ")]
    assert "longer than the model (400 tokens" in line
    tokens = len(chat.first_turn(rows[0]["prompt"]))
    named = re.findall(r"long\.jsonl:(\d) \((\d+) tokens\)", line)
    assert len(named) == 5
    assert line.endswith(" and 2 more")
    assert {int(count) for _, count in named} == {tokens}
    none = replace(some, prompts=(f"{files / 'long.jsonl'}:limit=2",), output=files / "none")
    with pytest.raises(InputError, match=r"prompts: all are longer than the model .*long\.jsonl:\d"):
        generate(none, target(chat)[1], lambda _: None)


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


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"answers": AnswerSettings(top_p=1.5)}, "^--top-p: got 1.5, expected"),
        ({"answers": AnswerSettings(top_k=-2)}, "^--top-k: got -2, expected"),
        ({"answers": AnswerSettings(max_tokens=0)}, "^--max-tokens: got 0, expected"),
        ({"answers": AnswerSettings(loop_limit=-1)}, r"^--loop-limit -1: expected 0 \(never\) or more"),
        ({"turns": SelfPromptSettings(top_p=0.0)}, "^--self-top-p: got 0.0, expected"),
        ({"turns": SelfPromptSettings(max_tokens=0)}, "^--self-max-tokens: got 0, expected"),
        ({"turns": SelfPromptSettings(temperature=-1.0)}, "^--self-temperature: got -1.0, expected"),
        ({"self_prompts": (SelfPromptGroup(1, temperature=float("inf")),)}, "^--self-temperature: got inf, expected"),
        (
            {"self_prompts": (SelfPromptGroup(5), SelfPromptGroup(5, openings=("def",)))},
            "2 groups .*'self'.* name=NAME",
        ),
        ({"self_prompts": (SelfPromptGroup(5, "a b"), SelfPromptGroup(5, "a/b"))}, "2 groups .*'a_b'.* name=NAME"),
    ],
)
def test_bad_settings_are_refused_before_the_model_is_loaded(files, changed, message):
    with pytest.raises(InputError, match=message):
        generate(replace(job(files), **changed), lambda: pytest.fail("loaded"), print)
    assert not (files / "answers").exists()


def test_parts():
    assert parse_part("2/3") == (2, 3)
    for bad in ("0/3", "4/3", "x/3", "3", "1/0"):
        with pytest.raises(InputError, match="--shard"):
            parse_part(bad)
