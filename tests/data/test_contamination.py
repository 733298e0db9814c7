import json

import numpy as np
import pytest

from peagle.data.contamination import ContaminationGuard, DropReport, check_dataset, user_turns
from peagle.data.dataset import open_dataset, target_facts
from peagle.data.prompts import make_prompt
from peagle.data.shards import Answer, prepare_folder, write_shard
from peagle.errors import InputError
from tests.data.conftest import END

STORY = (
    "Compose an engaging travel blog post about a recent trip to the moon, highlighting low gravity experiences and "
    "must-see craters."
)
SUM = (
    "Mara has 12 baskets with 7 apples each. She sells 30 apples in the morning and twice as many in the afternoon. "
    "How many apples does she have left?"
)
STUB = (
    "from typing import List\n\n\ndef far_apart_elements(numbers: List[float], threshold: float) -> bool:\n"
    '    """ Check if in given list of numbers, any two are farther apart than the threshold.\n'
    "    >>> far_apart_elements([1.0, 2.0], 0.5)\n    True\n"
    '    """\n'
)
PRIME = (
    'def is_prime(n):\n    """Return true if a given number is prime, and false otherwise.\n'
    '    >>> is_prime(6)\n    False\n    """\n'
)
FOLLOW_UP = "Can you parallelize it?"


@pytest.fixture
def eval_files(tmp_path):
    (tmp_path / "mt.jsonl").write_text(json.dumps({"turns": [STORY, FOLLOW_UP]}) + "\n")
    (tmp_path / "maths.jsonl").write_text(json.dumps({"question": SUM, "answer": "#### -6"}) + "\n")
    (tmp_path / "code.jsonl").write_text(json.dumps({"prompt": STUB}) + "\n" + json.dumps({"prompt": PRIME}) + "\n")
    return [str(tmp_path / name) for name in ("mt.jsonl", "maths.jsonl", "code.jsonl")]


@pytest.fixture
def guard(eval_files):
    return ContaminationGuard.from_files(eval_files)


@pytest.mark.parametrize("text", [STORY, SUM, STUB, PRIME, FOLLOW_UP])
def test_verbatim(guard, text):
    assert guard.match(text).rule == "exact"


@pytest.mark.parametrize("text", [STORY, SUM, STUB])
def test_changed_space_case_and_punctuation(guard, text):
    assert guard.match(f"  {text.upper()}  ".replace(" ", "\n ").replace(",", " ;")) is not None


@pytest.mark.parametrize("text", [STORY, SUM, STUB, PRIME])
def test_inside_a_template(guard, text):
    assert guard.match(f"You are helpful.\n\nTask:\n```\n{text}\n```\nAnswer in French.") is not None


def test_a_part_of_it(guard):
    assert guard.match("She sells 30 apples in the morning and twice as many in the afternoon.") is not None


def test_lightly_edited(guard):
    assert guard.match(SUM.replace("Mara", "Tom").replace("She", "He").replace(" she ", " he ")) is not None
    shuffled = (
        "How many apples does Mara have left? Mara has 12 baskets with 7 apples each. In the morning she sells 30 "
    )
    assert guard.match(shuffled + "apples and in the afternoon twice as many.") is not None


def test_code_by_function_name_and_by_task(guard):
    javascript = (
        "/**\n * Write a function to tell whether any two numbers are far apart.\n"
        " * > farApartElements([1], 2)\n * false\n"
        " */\nfunction farApartElements(numbers, threshold) {\n"
    )
    assert guard.match(javascript).rule == "function"
    assert guard.match("Please explain what far_apart_elements would do.").rule == "function"
    assert guard.match("Write a Python function that checks whether a number is prime.") is not None
    assert guard.match('def prime_test(k):\n    """ Return whether the number is prime. """\n').rule == "task"


@pytest.mark.parametrize(
    "text",
    [
        "Compose an engaging blog post about a recent concert.",
        "Mara has 12 baskets of pears. How many pears does she have in all if each basket holds 9?",
        'def add_up(a, b):\n    """ Add the values of two dictionaries.\n    >>> add_up({}, {})\n    {}\n    """\n',
        "Write a Python function that reverses the words of a sentence.",
        "What is a good name for a cat? Can you parallelize it? No, I mean the name.",
        "How many does she have left?",
        "",
    ],
)
def test_similar_by_nature_passes(guard, text):
    assert guard.match(text) is None


def test_filter_looks_at_every_turn_and_counts(guard):
    report = DropReport()
    prompts = [
        make_prompt("a", ["Hello you there", SUM]),
        make_prompt("a", [STORY]),
        make_prompt("a", ["Tell me more."]),
    ]
    assert guard.filter(prompts, report) == prompts[2:]
    assert report.lines() == [
        "a: 1 prompt(s) too close to maths (exact)",
        "a: 1 prompt(s) too close to mt (exact)",
    ]


def test_user_turns_are_the_runs_outside_the_mask():
    assert user_turns([1, 2, 3, 4, 5], [False, False, True, False, True]) == [[1, 2], [4]]
    assert user_turns([1], [True]) == []


def row(chat, turns, source="planted"):
    """A conversation with these user turns, as the generator writes them."""
    ids = chat.first_turn(turns[0])
    mask = [False] * len(ids)
    for turn in [*turns[1:], None]:
        answer = [*chat.encode("Yes."), END]
        ids, mask = ids + answer, mask + [True] * len(answer)
        if turn is not None:
            later = chat.later_turn(turn, ids)
            ids, mask = ids + later, mask + [False] * len(later)
    return Answer(ids, mask, source, 0.0, "stop", "abc123")


@pytest.mark.parametrize(
    "turns", [[STORY], [f"Now do this: {STUB.upper()}"], ["Hi there, friend", SUM], ["Hello", FOLLOW_UP]]
)
def test_check_dataset_refuses_a_planted_prompt(tmp_path, chat, eval_files, turns):
    folder = tmp_path / "answers"
    prepare_folder(folder, target_facts("tiny", chat.tokenizer, 300), {})
    write_shard(folder / "answers-00000.parquet", [row(chat, ["What is rain?"], "fine"), row(chat, turns)])
    with pytest.raises(InputError, match=r"example 1 of source 'planted' \(prompt_id abc123\)"):
        check_dataset(open_dataset(folder), eval_files, chat)


def test_check_dataset_passes_a_clean_one(tmp_path, chat, eval_files):
    folder = tmp_path / "answers"
    prepare_folder(folder, target_facts("tiny", chat.tokenizer, 300), {})
    write_shard(
        folder / "answers-00000.parquet", [row(chat, ["What is rain?", "And snow?"]), row(chat, ["What is rain?"])]
    )
    dataset = open_dataset(folder)
    assert check_dataset(dataset, eval_files, chat) == 2
    assert dataset[0].input_ids.dtype == np.int32
