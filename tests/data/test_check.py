import numpy as np
import pytest

from peagle.data.check import check_dataset, user_turns
from peagle.data.dataset import open_dataset
from peagle.data.metadata import target_facts
from peagle.data.shards import Answer, prepare_folder, write_shard
from peagle.errors import InputError
from tests.data.conftest import END, FOLLOW_UP, STORY, STUB, SUM


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
