"""What is asked, and in which order."""

from __future__ import annotations

import gzip
import json

import pytest

from peagle.bench.conversations import Chat
from peagle.bench.questions import Questions
from peagle.bench.records import Record
from peagle.bench.workloads import Workload, load_workload, load_workloads
from peagle.data.prompts import make_prompt
from peagle.errors import InputError
from peagle.target.text import read_target_text


@pytest.fixture(scope="module")
def text(target_folder):
    return read_target_text(str(target_folder("llama")))


@pytest.fixture
def mt_bench(tmp_path):
    path = tmp_path / "question.jsonl"
    rows = [{"question_id": i, "category": "writing", "turns": [f"first {i}", f"second {i}"]} for i in range(10)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_published_forms_under_a_name(mt_bench, tmp_path):
    workload = load_workload(f"mt_bench={mt_bench}", None, None, 0)
    assert (workload.name, len(workload), workload.num_requests()) == ("mt_bench", 10, 20)
    humaneval = tmp_path / "HumanEval.jsonl.gz"
    with gzip.open(humaneval, "wt") as file:
        file.write(json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "..."}) + "\n")
    assert load_workload(f"humaneval={humaneval}", None, None, 0).prompts[0].turns == ("def f():\n",)
    gsm8k = tmp_path / "test.jsonl"
    gsm8k.write_text(json.dumps({"question": "How many?", "answer": "#### 4"}) + "\n")
    assert load_workload(f"gsm8k={gsm8k}", None, None, 0).prompts[0].turns == ("How many?",)
    assert load_workload(str(gsm8k), None, None, 0).name == "test"
    prepared = tmp_path / "qualitative.jsonl"
    prepared.write_text(json.dumps({"messages": [{"role": "user", "content": "q"}], "category": "coding"}) + "\n")
    spec = f"speed_bench={prepared}:where=category=coding"
    assert load_workload(spec, None, None, 0).prompts[0].turns == ("q",)


def test_a_number_of_prompts_is_the_same_choice_every_time(mt_bench):
    five, again, three = (load_workload(f"w={mt_bench}", n, None, 0) for n in (5, 5, 3))
    assert five == again
    assert five.fingerprint == again.fingerprint != three.fingerprint
    assert set(three.prompts) < set(five.prompts)
    assert load_workload(f"w={mt_bench}:3", None, None, 0) == three


def test_the_shuffled_order_is_fixed(mt_bench):
    workload = load_workload(f"w={mt_bench}", None, None, 0)
    shuffled = workload.shuffled()
    assert shuffled.prompts != workload.prompts
    assert set(shuffled.prompts) == set(workload.prompts)
    assert shuffled == workload.shuffled()
    assert shuffled.num_requests(3) == 6


def test_random_lengths(text):
    workload = load_workload("random:20:7:5", None, text, 1)
    assert (workload.name, len(workload), workload.output_len) == ("random_20_7", 5, 7)
    ids = {token for row in workload.token_ids for token in row}
    assert all(len(row) == 20 for row in workload.token_ids)
    assert max(ids) < 256  # neither special tokens nor ids without text
    assert workload == load_workload("random:20:7:5", None, text, 1)
    assert workload != load_workload("random:20:7:5", None, text, 2)


def test_random_lengths_without_a_tokenizer(target_folder, tmp_path):
    folder = target_folder("llama")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    bare = read_target_text(str(tmp_path))
    assert bare.tokenizer is None
    ids = {token for row in load_workload("random:200:7:5", None, bare, 1).token_ids for token in row}
    assert max(ids) < bare.facts.vocab_size
    assert not ids & bare.eos_token_ids


def test_built_in_prompts():
    assert len(load_workload("quick", None, None, 0)) == 8
    assert len(load_workload("quick", 3, None, 0)) == 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("no/such.jsonl", "no such file"),
        ("mt_bench=no/such.jsonl", "no such file"),
        ("random:20", "expected random:IN:OUT"),
        ("random:20:0", "expected random:IN:OUT"),
        ("random:20:4", "needs TARGET"),
        ("speed_bench:huge", "'huge' is no configuration, expected qualitative"),
    ],
)
def test_bad_specs(spec, words):
    with pytest.raises(InputError, match=words):
        load_workload(spec, None, None, 0)


@pytest.fixture
def no_hub(monkeypatch):
    """The Hub cannot be reached."""

    def refuse(name, split="train", config=None):
        raise InputError(f"hub:{name}: cannot be loaded: ConnectionError: no network")
        yield

    monkeypatch.setattr("peagle.data.prompts.read_hub_records", refuse)


def test_without_network_the_file_is_asked_for(no_hub):
    for name in ("mt_bench", "humaneval", "gsm8k"):
        with pytest.raises(InputError, match=rf"no network.*--workload {name}=FILE"):
            load_workload(name, None, None, 0)
    with pytest.raises(InputError, match=r"no network.*Evaluation Dataset License"):
        load_workload("speed_bench:qualitative:coding", None, None, 0)


def test_speed_bench_from_the_hub(monkeypatch):
    asked = []

    def rows(name, split="train", config=None):
        asked.append((name, split, config))
        for i, category in enumerate(["coding", "math", "coding"]):
            yield f"row {i}", {"turns": [f"question {i}"], "category": category}

    monkeypatch.setattr("peagle.data.prompts.read_hub_records", rows)
    workload = load_workload("speed_bench:throughput_2k:coding", None, None, 0)
    assert asked == [("nvidia/SPEED-Bench", "test", "throughput_2k")]
    assert workload.name == "speed_bench_throughput_2k_coding"
    assert [prompt.turns for prompt in workload.prompts] == [("question 0",), ("question 2",)]


def test_rows_that_hold_a_note_in_place_of_text_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    note = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    path.write_text(json.dumps({"turns": ["a question"]}) + "\n" + json.dumps({"turns": [note]}) + "\n")
    with pytest.raises(InputError, match=r"1 of 2 prompts hold no text.*speed_bench=FILE"):
        load_workload(str(path), None, None, 0)


def test_two_of_a_name(mt_bench):
    with pytest.raises(InputError, match="two are named 'question'"):
        load_workloads([str(mt_bench), str(mt_bench)], None, None, 0)


def answered(conversation: int, turn: int, ids: list[int]) -> Record:
    return Record(conversation, turn, 0.0, token_ids=ids, output_tokens=len(ids), finish_reason="stop")


def test_questions_in_token_ids(text):
    chat = Chat(text)
    workload = Workload("w", "", (make_prompt("w", ["hi", "more"]), make_prompt("w", ["yo"])))
    questions = Questions(workload, chat, 10, 200)
    first = questions.first(0)
    assert first.max_tokens == 10
    assert chat.tokenizer.decode(first.token_ids) == "<user>hi<|end|><assistant>"
    second = questions.after(first, answered(0, 0, [70, 71]))
    assert second is not None
    assert chat.tokenizer.decode(second.token_ids).endswith("<|end|><user>more<|end|><assistant>")
    assert list(second.token_ids[: len(first.token_ids) + 2]) == [*first.token_ids, 70, 71]
    assert questions.after(second, answered(0, 1, [70])) is None
    assert questions.num_skipped == 0
    only_first = Questions(workload, chat, 10, 200, first_turns=True)
    assert only_first.after(only_first.first(0), answered(0, 0, [70])) is None
    assert only_first.num_skipped == 0


def test_answers_are_cut_to_the_room_and_turns_without_room_left_out(text):
    chat = Chat(text)
    workload = Workload("w", "", (make_prompt("w", ["hi", "x" * 40, "y"]),))
    length = len(chat.first(workload.prompts[0]))
    questions = Questions(workload, chat, 50, length + 20)
    questions.check_lengths()
    first = questions.first(0)
    assert first.max_tokens == 20
    assert questions.after(first, answered(0, 0, [70] * 20)) is None
    assert questions.num_skipped == 2
    with pytest.raises(InputError, match=r"prompt 1 has \d+ tokens"):
        Questions(workload, chat, 50, length).check_lengths()
    exact = Workload("r", "", token_ids=((1, 2, 3),), output_len=8)
    Questions(exact, None, 50, 11).check_lengths()
    with pytest.raises(InputError, match="its answer needs 8, expected at most 10 together"):
        Questions(exact, None, 50, 10).check_lengths()
