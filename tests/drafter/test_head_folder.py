"""What writing a head never takes away: models, projects, the head itself, files that are no part of a head."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from peagle.drafter import load_drafter, save_drafter
from peagle.drafter.convert import convert_head
from peagle.drafter.facts import read_head_facts
from peagle.errors import InputError
from tests.drafter.heads import edit_config, make_drafter


def listing(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(source: Path, output: Path, match: str, everything: Path) -> None:
    """`convert --force` says so, and nothing in `everything` changes."""
    before = listing(everything)
    with pytest.raises(InputError, match=match):
        convert_head(source, output, "speculators", force=True)
    assert listing(everything) == before


def put(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


TARGET = json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32})


@pytest.mark.parametrize("config", [TARGET, "{}", "[]", "{", "", '{"architectures": -1}', "null"])
def test_a_folder_of_something_else_stays(tmp_path, head, config):
    folder = put(tmp_path / "target", config__json=config, model__safetensors="weights")
    refused(head, folder, "target is not a head's folder, it is not replaced", tmp_path)
    (folder / "model-00001-of-00002.safetensors").write_text("shard")  # saving would take it away
    before = listing(folder)
    with pytest.raises(InputError, match="target is not a head's folder"):
        save_drafter(make_drafter(), folder)
    assert listing(folder) == before


def test_weights_without_a_config_stay(tmp_path, head):
    folder = put(tmp_path / "weights", model__safetensors="weights")
    refused(head, folder, r"not a head's folder \(no config\.json\)", tmp_path)
    with pytest.raises(InputError, match=r"holds weights without a config\.json"):
        save_drafter(make_drafter(), folder)
    assert listing(folder) == {"model.safetensors": b"weights"}


@pytest.mark.parametrize("name", ["thesis.txt", "pytorch_model.bin", "config.json.bak", "run_plan.txt", ".env"])
def test_a_file_that_no_head_has_is_named(tmp_path, head, name):
    there = convert_head(head, tmp_path / "there", "native")
    (there / name).write_text("mine")
    refused(head, there, rf"holds what is no part of a head \({name}\)", tmp_path)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to(path.parent), lambda p: p.symlink_to("no")])
def test_what_is_no_file_is_named(tmp_path, head, make):
    there = convert_head(head, tmp_path / "there", "native")
    make(there / "checkpoints")
    refused(head, there, r"no part of a head \(checkpoints", tmp_path)
    save_drafter(make_drafter(kind="eagle3"), there)  # replaces files, so this stays
    assert (there / "checkpoints").is_symlink() or (there / "checkpoints").is_dir()
    assert load_drafter(there).config.kind == "eagle3"


def test_many_are_counted(tmp_path, head):
    there = convert_head(head, tmp_path / "there", "native")
    for i in range(7):
        (there / f"data{i}").write_text("")
    refused(head, there, r"\(data0, data1, data2, data3, data4 and 2 more\)", tmp_path)


def test_what_a_head_may_hold_is_replaced(tmp_path, head):
    there = convert_head(head, tmp_path / "there", "native")
    notes = ("run.json", "run-1.json", "metrics.jsonl", "draft_vocabulary.json")
    for name in (*notes, "README.md", "LICENSE.txt", ".gitattributes", "a.safetensors", "a.safetensors.index.json"):
        (there / name).write_text("old")
    (head / "figure.png").write_text("of the card")
    shutil.copyfile(head / "figure.png", there / "figure.png")  # the same file comes back
    convert_head(head, there, "speculators", force=True)
    assert read_head_facts(there).problems == []
    assert sorted(path.name for path in there.iterdir()) == ["config.json", "figure.png", "model.safetensors"]
    (there / "figure.png").write_text("another")
    refused(head, there, r"no part of a head \(figure\.png\)", tmp_path)


def test_the_head_and_the_output_are_apart(tmp_path, monkeypatch):
    outer = save_drafter(make_drafter(), tmp_path / "outer")
    inner = save_drafter(make_drafter(), outer / "inner")
    (tmp_path / "link").symlink_to(outer)
    for source, output, match in (
        (inner, outer, "contains the head"),
        (inner, tmp_path / "link", "contains the head"),
        (tmp_path / "link" / "inner", outer, "contains the head"),
        (outer, inner, "lies in the head"),
        (outer, tmp_path / "link" / "new" / "folder", "lies in the head"),
        (outer, tmp_path / "link", "is the head itself"),
        (outer, inner / ".." / ".." / "outer", "is the head itself"),
    ):
        refused(source, output, match, tmp_path)
    monkeypatch.chdir(outer)
    refused(Path("inner"), Path("."), "contains the head", tmp_path)
    with pytest.raises(InputError, match="lies in the head"):
        convert_head(outer, outer / "new", "speculators")
    assert not (outer / "new").exists()


def test_what_comes_while_it_converts_stays(tmp_path, head, monkeypatch):
    from peagle.drafter import convert

    there = convert_head(head, tmp_path / "there", "native")
    real = convert.write_files

    def write(*arguments):
        (there / "notes.txt").write_text("mine")
        real(*arguments)

    monkeypatch.setattr(convert, "write_files", write)
    with pytest.raises(InputError, match=r"notes\.txt"):
        convert_head(head, there, "speculators", force=True)
    assert (there / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head", "there"]


def test_a_link_to_a_head_is_replaced_and_its_head_stays(tmp_path, head):
    there = convert_head(head, tmp_path / "there", "native")
    before = listing(there)
    (tmp_path / "link").symlink_to(there)
    convert_head(head, tmp_path / "link", "speculators", force=True)
    assert not (tmp_path / "link").is_symlink()
    assert listing(there) == before


def test_a_head_whose_config_is_wrong_is_not_replaced(tmp_path, head):
    there = convert_head(head, tmp_path / "there", "native")
    edit_config(there, head_dim=True)
    refused(head, there, "not a head's folder, it is not replaced .*head_dim: got True", tmp_path)
