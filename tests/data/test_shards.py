import errno
import json

import pyarrow
import pyarrow.parquet
import pytest

from peagle.data.dataset import SCHEMA
from peagle.data.shards import (
    Answer,
    ShardWriter,
    answered_prompts,
    new_folder,
    prepare_folder,
    replacing,
    write_counts,
    write_shard,
)
from peagle.errors import InputError

TARGET = {"name": "tiny", "vocab_size": 300, "tokenizer": "t", "chat_template": "c"}


def answer(key="p", temperature=0.0, tokens=(1, 2, 3)):
    return Answer(list(tokens), [False] + [True] * (len(tokens) - 1), "s", temperature, "stop", key)


def test_shard_has_the_columns(tmp_path):
    write_shard(tmp_path / "answers-00000.parquet", [answer("a"), answer("b", 0.8, (5, 6))])
    table = pyarrow.parquet.read_table(tmp_path / "answers-00000.parquet")
    assert table.schema.equals(SCHEMA)
    assert table["input_ids"].to_pylist() == [[1, 2, 3], [5, 6]]
    assert table["answer_mask"].to_pylist() == [[False, True, True], [False, True]]
    assert (
        pyarrow.parquet.read_metadata(tmp_path / "answers-00000.parquet").row_group(0).column(0).compression == "ZSTD"
    )


def test_writer_cuts_shards_and_numbers_go_on(tmp_path):
    writer = ShardWriter(tmp_path, rows=2)
    for key in "abcde":
        writer.add(answer(key))
    writer.flush()
    ShardWriter(tmp_path, "2of3", rows=1).add(answer("x"))
    again = ShardWriter(tmp_path, rows=1)
    again.add(answer("f"))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == [*(f"answers-0000{n}.parquet" for n in range(4)), "answers-2of3-00000.parquet"]
    assert set(answered_prompts(tmp_path)) == set("abcdefx")


def test_a_shard_is_due_after_a_while(tmp_path):
    writer = ShardWriter(tmp_path, rows=1000, seconds=-1)
    writer.add(answer("a"))
    assert set(answered_prompts(tmp_path)) == {"a"}


def test_temperatures_of_answered_prompts(tmp_path):
    write_shard(tmp_path / "answers-00000.parquet", [answer("a", 0.0), answer("a", 0.8)])
    assert answered_prompts(tmp_path) == {"a": {0.0, 0.8}}


def test_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(table, path, **_):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    with pytest.raises(InputError, match=r"answers-00000\.parquet: no space left on the disk"):
        write_shard(tmp_path / "answers-00000.parquet", [answer()])
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_the_old_file(tmp_path):
    (tmp_path / "x").write_text("old")

    def interrupted():
        with replacing(tmp_path / "x") as temporary:
            temporary.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert (tmp_path / "x").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_new_folder_is_there_whole_or_not_at_all(tmp_path):
    def broken(path):
        with new_folder(path) as work:
            (work / "half").write_text("x")
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(InputError, match=r"sub/new: cannot be written .*Input/output error"):
        broken(tmp_path / "sub" / "new")
    assert list((tmp_path / "sub").iterdir()) == []
    (tmp_path / "empty").mkdir()
    for name in ("sub/new", "empty"):
        with new_folder(tmp_path / name) as work:
            (work / "whole").write_text("x")
            assert not (tmp_path / name / "whole").exists()
        assert [path.name for path in (tmp_path / name).iterdir()] == ["whole"]
        assert not work.exists()
    (tmp_path / "file").write_text("x")
    for name, message in (("file", "is a file"), ("empty", "is not empty"), ("file/in", "cannot be written")):
        with pytest.raises(InputError, match=f"{name}: {message}"), new_folder(tmp_path / name):
            pytest.fail("written")
    assert (tmp_path / "file").read_text() == "x"


def test_folder_keeps_one_target_and_all_runs(tmp_path):
    folder = tmp_path / "a" / "b"
    prepare_folder(folder, TARGET, {"seed": 0})
    prepare_folder(folder, TARGET, {"seed": 0})
    prepare_folder(folder, {**TARGET, "name": "same tokenizer"}, {"seed": 1})
    metadata = json.loads((folder / "dataset.json").read_text())
    assert metadata["target"] == TARGET
    assert metadata["generation"] == [{"seed": 0}, {"seed": 1}]
    with pytest.raises(InputError, match="this run was made with other"):
        prepare_folder(folder, {**TARGET, "name": "other", "tokenizer": "u"}, {})
    write_shard(folder / "answers-00000.parquet", [answer("a"), answer("b")])
    write_counts(folder)
    assert json.loads((folder / "dataset.json").read_text())["counts"] == {"examples": 2, "shards": 1}


def test_shards_without_metadata_are_refused(tmp_path):
    write_shard(tmp_path / "answers-00000.parquet", [answer()])
    with pytest.raises(InputError, match=r"holds shards but no dataset\.json"):
        prepare_folder(tmp_path, TARGET, {})
