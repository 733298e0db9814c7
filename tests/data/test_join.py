import json

import pytest
from typer.testing import CliRunner

from peagle.cli.data import data_app
from peagle.data.dataset import open_dataset
from peagle.data.join import join_conversations
from peagle.data.merge import merge_datasets
from peagle.data.metadata import read_metadata, target_facts
from peagle.data.shards import Answer, prepare_folder, write_shard
from peagle.errors import InputError


def answer(name: int, length: int, temperature: float = 0.0) -> Answer:
    return Answer([name] * length, [False] + [True] * (length - 1), "chat", temperature, "stop", f"p{name}")


@pytest.fixture
def folder(tmp_path, tokenizer):
    folder = tmp_path / "answers"
    prepare_folder(folder, target_facts("tiny", tokenizer, 300), {"seed": 0})
    rows = [answer(i, 3 + i % 4, 0.8 * (i % 5 == 0)) for i in range(40)]
    write_shard(folder / "answers-00000.parquet", [*rows, answer(90, 30)])
    return folder


def rows(folder):
    dataset = open_dataset(folder)
    return [
        (dataset.sources[i], dataset.temperatures[i], dataset[i].input_ids.tolist(), dataset[i].answer_mask.tolist())
        for i in range(len(dataset))
    ]


def test_nothing_is_lost_and_temperatures_stay_apart(folder, tmp_path):
    count, joined = join_conversations([folder], tmp_path / "long", 20)
    found, before = rows(tmp_path / "long"), rows(folder)
    assert (count, joined) == (len(found), sum(source == "joined" for source, *_ in found))
    assert joined > 5
    assert sorted(t for *_, ids, _ in found for t in ids) == sorted(t for *_, ids, _ in before for t in ids)
    temperature = {ids[0]: heat for _, heat, ids, _ in before}
    masks = {ids[0]: mask for *_, ids, mask in before}
    for source, heat, ids, mask in found:
        names = list(dict.fromkeys(ids))
        assert mask == [bit for name in names for bit in masks[name]]
        assert {temperature[name] for name in names} == {heat}
        assert len(ids) <= 20 or names == [90]  # longer than that already: as it was
        assert (source == "joined") == (len(names) > 1)
    assert len({open_dataset(tmp_path / "long").prompt_ids[i] for i in range(count)}) == count


def test_share_and_seed(folder, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        join_conversations([folder], tmp_path / name, 16, share=0.3, seed=seed)
    a, b, c = (rows(tmp_path / name) for name in "abc")
    assert a == b
    assert a != c
    total = sum(len(ids) for *_, ids, _ in a)
    assert 0.2 < sum(len(ids) for source, *_, ids, _ in a if source == "joined") / total < 0.5
    generation = read_metadata(tmp_path / "a")["generation"]
    assert generation[-1] == {"joined": {"tokens": 16, "share": 0.3, "seed": 1}}
    assert json.loads((tmp_path / "a" / "dataset.json").read_text())["counts"]["examples"] == len(a)


def test_how_all_inputs_were_made_stays(folder, tmp_path, tokenizer):
    other = tmp_path / "other"
    prepare_folder(other, target_facts("tiny", tokenizer, 300), {"seed": 1})
    write_shard(other / "answers-00000.parquet", [answer(50, 4)])
    join_conversations([folder, other], tmp_path / "long", 20)
    *made, joined = read_metadata(tmp_path / "long")["generation"]
    assert made == [{"seed": 0}, {"seed": 1}]
    assert joined["joined"]["tokens"] == 20


def test_refusals_leave_nothing(folder, tmp_path):
    for arguments, message in (
        ((1, 1.0), "tokens: got 1, expected at least 2"),
        ((8, 0.0), "share: got 0.0, expected more than 0"),
        ((8, 1.5), "share: got 1.5"),
    ):
        with pytest.raises(InputError, match=message):
            join_conversations([folder], tmp_path / "new", *arguments)
    assert not (tmp_path / "new").exists()
    with pytest.raises(InputError, match="holds a data set already"):
        join_conversations([folder], folder, 20)


@pytest.mark.parametrize("how", ["merge", "join"])
def test_a_full_disk_at_the_second_shard_leaves_nothing(folder, tmp_path, monkeypatch, how):
    def write(output):
        if how == "merge":
            return merge_datasets([folder], output, rows=10)
        return join_conversations([folder], output, 9, rows=10)

    shards = []

    def full(path, answers):
        shards.append(path)
        if len(shards) == 2:
            raise InputError(f"{path}: no space left on the disk")
        write_shard(path, answers)

    with monkeypatch.context() as patched:
        patched.setattr("peagle.data.shards.write_shard", full)
        with pytest.raises(InputError, match="no space left"):
            write(tmp_path / "new")
    assert len(shards) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["answers"]
    write(tmp_path / "new")
    assert len(open_dataset(tmp_path / "new")) > 10
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="file: is a file; expected a new folder"):
        write(tmp_path / "file")


def test_command(folder, tmp_path):
    result = CliRunner().invoke(data_app, ["join", str(folder), "-o", str(tmp_path / "long"), "--tokens", "20"])
    assert result.exit_code == 0
    assert "of them joined" in result.output
