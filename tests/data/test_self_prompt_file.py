import json

import pytest

from peagle.data.prompts import load_prompts
from peagle.data.self_prompt_file import UNCOUNTED, SelfPromptFile
from peagle.errors import InputError

FIRST, SECOND = "Why is the sea salt?", "Who built the tower?"


def test_turns_and_attempts_come_back(tmp_path):
    path = tmp_path / "self-prompts-x-1of1.jsonl"
    written = SelfPromptFile(path, "x")
    written.add(FIRST)
    written.add(SECOND)
    written.attempts.made = 17
    written.save()
    again = SelfPromptFile(path, "x")
    assert (again.turns, again.attempts.made) == ([FIRST, SECOND], 17)
    assert [prompt.turns[0] for prompt in load_prompts([str(path)])] == [FIRST, SECOND]


def test_a_file_of_an_earlier_version_repeats_no_attempt(tmp_path):
    path = tmp_path / "self-prompts-x-1of1.jsonl"
    path.write_text(json.dumps({"prompt": FIRST, "source": "x"}) + "\n")
    assert SelfPromptFile(path, "x").attempts.made == UNCOUNTED


@pytest.mark.parametrize("limits", [{"every": 2}, {"seconds": -1.0}])
def test_it_is_saved_by_number_and_by_time(tmp_path, limits):
    path = tmp_path / "self-prompts-x-1of1.jsonl"
    written = SelfPromptFile(path, "x", **limits)
    written.add(FIRST)
    written.add(SECOND)
    assert SelfPromptFile(path, "x").turns == [FIRST, SECOND]


def test_nothing_written_is_no_file(tmp_path):
    SelfPromptFile(tmp_path / "none.jsonl", "x").save()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("made", ["3", -1, True, 1.5])
def test_attempts_that_are_none(tmp_path, made):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": FIRST, "attempts": made}) + "\n")
    with pytest.raises(InputError, match=r"x\.jsonl:1: attempts: got .*, expected a whole number"):
        SelfPromptFile(path, "x")


def test_half_a_character_is_named(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"prompt": FIRST}) + "\n" + json.dumps({"prompt": "\ud83d"}) + "\n")
    with pytest.raises(InputError, match=r"x\.jsonl:2: field 'prompt': holds half a character"):
        SelfPromptFile(path, "x").save()
