import json

import pytest

from peagle.bench.json_file import check_writable, write_json
from peagle.errors import InputError


def test_round_trip(tmp_path):
    path = tmp_path / "out.json"
    path.write_text("old")
    write_json(path, {"text": "é"})
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "é"}
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]


def test_places_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match=r"--json: .* is a folder"):
        check_writable(tmp_path)
    with pytest.raises(InputError, match=r"--json: the folder .*missing does not exist"):
        check_writable(tmp_path / "missing" / "out.json")


def test_a_failure_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(InputError, match=r"out.json cannot be written .No space left on device"):
        write_json(path, {})
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
