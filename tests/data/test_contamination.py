import pytest

from peagle.data.contamination import ContaminationGuard, DropReport
from peagle.data.prompts import make_prompt
from tests.data.conftest import FOLLOW_UP, PRIME, STORY, STUB, SUM


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
