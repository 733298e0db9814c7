import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from peagle.data.dataset import AnswerDataset, open_dataset
from peagle.data.merge import merge_datasets
from peagle.data.metadata import read_metadata, target_facts
from peagle.data.shards import Answer, answered_prompts, prepare_folder, write_shard
from peagle.errors import InputError
from tests.data.conftest import make_tokenizer

ROWS = [
    Answer([1, 5, 6, 2], [False, False, True, True], "a", 0.0, "stop", "p0"),
    Answer([1, 7, 7], [False, True, True], "b", 0.8, "length", "p1"),
    Answer([1, 9, 2, 4, 8, 2], [False, True, True, False, True, True], "a", 0.0, "stop", "p2"),
]


@pytest.fixture
def folder(tmp_path, tokenizer):
    folder = tmp_path / "answers"
    prepare_folder(folder, target_facts("tiny", tokenizer, 300), {"seed": 0})
    write_shard(folder / "answers-00000.parquet", ROWS[:2])
    write_shard(folder / "answers-1of2-00000.parquet", ROWS[2:])
    return folder


def same(example, row):
    return example.input_ids.tolist() == row.input_ids and example.answer_mask.tolist() == row.answer_mask


def test_examples(folder):
    dataset = open_dataset(folder)
    assert len(dataset) == 3
    assert all(same(example, row) for example, row in zip(dataset, ROWS, strict=True))
    assert same(dataset[-1], ROWS[2])
    assert (dataset[0].input_ids.dtype, dataset[0].answer_mask.dtype) == (np.int32, np.bool_)
    assert dataset.lengths.tolist() == [4, 3, 6]
    assert dataset.answer_lengths.tolist() == [2, 2, 4]
    assert dataset.sources == ["a", "b", "a"]
    assert dataset.finish_reasons == ["stop", "length", "stop"]
    assert dataset.temperatures.tolist() == [0.0, np.float32(0.8), 0.0]
    with pytest.raises(IndexError):
        dataset[3]


def test_shards_are_dropped_and_read_again(folder):
    dataset = AnswerDataset([folder], cache_bytes=1)
    for index in (0, 2, 1, 2, 0):
        assert same(dataset[index], ROWS[index])


def test_token_counts_are_of_answers(folder):
    counts = open_dataset(folder).token_counts(300)
    assert {int(t): int(counts[t]) for t in np.flatnonzero(counts)} == {2: 3, 6: 1, 7: 2, 8: 1, 9: 1}
    with pytest.raises(InputError, match="token id 9 is outside the vocabulary of 9"):
        open_dataset(folder).token_counts(9)


def test_fingerprint_follows_the_contents(folder, tmp_path):
    fingerprint = open_dataset(folder).fingerprint
    assert open_dataset(str(folder)).fingerprint == fingerprint
    write_shard(folder / "answers-00001.parquet", ROWS[:1])
    assert open_dataset(folder).fingerprint != fingerprint


def test_another_target_is_refused(folder, tokenizer):
    dataset = open_dataset(folder)
    dataset.check_target(tokenizer, 300)
    with pytest.raises(InputError, match=r"made with tiny \(vocab_size 300\); this target's vocab_size is 301"):
        dataset.check_target(tokenizer, 301)
    with pytest.raises(InputError, match="made with the tokenizer of tiny"):
        dataset.check_target(make_tokenizer(("extra",)), 300)
    with pytest.warns(UserWarning, match="another chat template"):
        dataset.check_target(make_tokenizer(template="other"), 300)


def test_truncated_shard_is_named(folder):
    path = folder / "answers-00000.parquet"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(InputError, match=r"answers-00000\.parquet: corrupt shard"):
        open_dataset(folder)


def test_changed_shard_is_named(folder):
    path = folder / "answers-00000.parquet"
    table = pyarrow.parquet.read_table(path)
    ids = pyarrow.array([[1, 5, 6, 3], [1, 7, 7]], table.schema.field("input_ids").type)
    pyarrow.parquet.write_table(table.set_column(0, table.schema.field(0), ids), path)
    with pytest.raises(InputError, match=r"answers-00000\.parquet: corrupt shard: .* digest"):
        open_dataset(folder)


@pytest.mark.parametrize("key", [b"peagle.digest", b"peagle.digest.facts"])
def test_a_digest_that_is_no_text_is_a_corrupt_shard(folder, key):
    path = folder / "answers-00000.parquet"
    table = pyarrow.parquet.read_table(path)
    schema = table.schema.with_metadata({**table.schema.metadata, key: b"\xff" * 64})
    pyarrow.parquet.write_table(table.cast(schema), path)
    with pytest.raises(InputError, match=r"answers-00000\.parquet: corrupt shard: .* digest"):
        open_dataset(folder)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("source", ["a", "a"]),
        ("temperature", [0.0, 0.7]),
        ("finish_reason", ["stop", "stop"]),
        ("prompt_id", ["p0", "p2"]),
    ],
)
def test_a_change_beside_the_tokens_is_found(folder, name, values):
    path = folder / "answers-00000.parquet"
    table = pyarrow.parquet.read_table(path)
    place = table.schema.get_field_index(name)
    changed = pyarrow.array(values, table.schema.field(name).type)
    changed = table.set_column(place, table.schema.field(name), changed)
    pyarrow.parquet.write_table(changed, path)
    for read in (open_dataset, answered_prompts):
        with pytest.raises(InputError, match=r"answers-00000\.parquet: corrupt shard: .* digest"):
            read(folder)
    first = {b"peagle.digest": table.schema.metadata[b"peagle.digest"]}
    pyarrow.parquet.write_table(changed.replace_schema_metadata(first), path)
    assert len(open_dataset(folder)) == 3, "shards of earlier versions have the first digest alone"


def test_text_that_is_none_is_a_corrupt_shard(folder):
    path = folder / "answers-00000.parquet"
    table = pyarrow.parquet.read_table(path)
    source = pyarrow.array([b"\xff\xfe", b"b"]).view(pyarrow.string())
    table = table.set_column(table.schema.get_field_index("source"), "source", source)
    pyarrow.parquet.write_table(table.replace_schema_metadata(None), path)
    with pytest.raises(InputError, match=r"answers-00000\.parquet: corrupt shard"):
        open_dataset(folder)


def test_other_columns_and_ids_out_of_range(folder):
    path = folder / "answers-00000.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"input_ids": [[1]]}), path)
    with pytest.raises(InputError, match="column 'input_ids' is missing or not list"):
        open_dataset(folder)
    write_shard(path, [Answer([1, 300], [False, True], "a", 0.0, "stop", "p")])
    with pytest.raises(InputError, match="outside the vocabulary of 300"):
        open_dataset(folder)


def test_missing_or_empty_folder(tmp_path, folder):
    with pytest.raises(InputError, match=r"no dataset\.json in it"):
        open_dataset(tmp_path / "absent")
    for path in folder.glob("*.parquet"):
        path.unlink()
    with pytest.raises(InputError, match="has written nothing yet"):
        open_dataset(folder)


def test_merge_keeps_what_it_is_told(folder, tmp_path):
    everything = list(open_dataset(folder))
    temperatures = open_dataset(folder).temperatures
    cold = [i for i in range(len(everything)) if float(temperatures[i]) == 0]
    assert 0 < len(cold) < len(everything)
    assert merge_datasets([folder], tmp_path / "cold", temperatures=[0.0]) == len(cold)
    assert set(open_dataset(tmp_path / "cold").temperatures.tolist()) == {0.0}
    first_two = sum(len(example.input_ids) for example in everything[:2])
    assert merge_datasets([folder], tmp_path / "two", max_tokens=first_two) == 2
    assert merge_datasets([folder], tmp_path / "one", max_tokens=first_two - 1) == 1
    with pytest.raises(InputError, match="no example is left"):
        merge_datasets([folder], tmp_path / "none", temperatures=[0.3])


def test_several_folders(folder, tmp_path, tokenizer):
    other = tmp_path / "more"
    prepare_folder(other, target_facts("tiny", tokenizer, 300), {"seed": 1})
    write_shard(other / "answers-00000.parquet", [ROWS[0], Answer([3, 4], [False, True], "c", 0.0, "stop", "p9")])
    assert len(open_dataset([folder, other])) == 5
    merged = tmp_path / "merged"
    assert merge_datasets([folder, other], merged, rows=2) == 4
    dataset = open_dataset(merged)
    assert [dataset.prompt_ids[i] for i in range(4)] == ["p0", "p1", "p2", "p9"]
    assert [run["seed"] for run in read_metadata(merged)["generation"]] == [0, 1]
    with pytest.raises(InputError, match="holds a data set already"):
        merge_datasets([folder], merged)
    strange = tmp_path / "strange"
    prepare_folder(strange, target_facts("other", make_tokenizer(("x",)), 301), {})
    write_shard(strange / "answers-00000.parquet", ROWS[:1])
    for read in (lambda: open_dataset([folder, strange]), lambda: merge_datasets([folder, strange], tmp_path / "new")):
        with pytest.raises(InputError, match=r"made with other.*tiny: two tokenizers"):
            read()
    assert not (tmp_path / "new").exists()
    assert json.loads((merged / "dataset.json").read_text())["counts"]["examples"] == 4
