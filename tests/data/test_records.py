import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from peagle.data.records import read_records
from peagle.errors import InputError


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet"])
def test_every_form_gives_the_same_rows(tmp_path, suffix):
    rows = [{"prompt": "one"}, {"prompt": "zwei äöü"}]
    path = tmp_path / f"prompts{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        text = json.dumps(rows) if "jsonl" not in suffix else "\n".join(map(json.dumps, rows)) + "\n\n"
        path.write_bytes(gzip.compress(text.encode()) if suffix.endswith(".gz") else text.encode())
    read = list(read_records(path))
    assert [row for _, row in read] == rows
    assert all(str(path) in place for place, _ in read)


def test_malformed_line_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(InputError, match=r"p\.jsonl:3: not JSON"):
        list(read_records(path))


@pytest.mark.parametrize("value", ["9" * 5000, "[" * 100_000])
def test_json_that_python_does_not_read_is_named(tmp_path, value):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": ' + value + "}\n")
    with pytest.raises(InputError, match=r"p\.jsonl:2: not JSON that can be read"):
        list(read_records(path))


def test_line_that_is_no_object_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n[1]\n')
    with pytest.raises(InputError, match=r"p\.jsonl:2: expected a JSON object, got list"):
        list(read_records(path))


def test_malformed_json_names_the_line(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('[\n{"prompt": "a"},\n{"prompt" "b"}]')
    with pytest.raises(InputError, match=r"p\.json:3: not JSON"):
        list(read_records(path))


@pytest.mark.parametrize(
    ("name", "content"), [("p.jsonl", b""), ("p.jsonl", b"\n\n"), ("p.json", b""), ("p.json", b"[]")]
)
def test_empty_file(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=r"p\.json.*(no rows|empty)"):
        list(read_records(tmp_path / name))


def test_truncated_gzip_and_wrong_encoding(tmp_path):
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 1000)[:-20])
    with pytest.raises(InputError, match="broken gzip"):
        list(read_records(tmp_path / "p.jsonl.gz"))
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(InputError, match="not UTF-8"):
        list(read_records(tmp_path / "p.jsonl"))


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json"])
def test_the_line_that_is_not_utf8_is_named(tmp_path, suffix):
    rows = [b'{"prompt": "a"}'] * 3 + [b'{"prompt": "\xff"}'] + [b'{"prompt": "a"}'] * 3
    content = b"[\n" + b",\n".join(rows[1:]) + b"]" if suffix == ".json" else b"\n".join(rows)
    path = tmp_path / f"p{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    with pytest.raises(InputError, match=rf"p{suffix}:4: not UTF-8 text: invalid start byte"):
        list(read_records(path))


def test_damaged_gzip(tmp_path):
    damaged = bytearray(gzip.compress(b'{"prompt": "b"}\n'))
    damaged[10:20] = bytes([255] * 10)  # no block of deflate: zlib.error, not EOFError or BadGzipFile
    for name in ("p.jsonl.gz", "p.json.gz"):
        (tmp_path / name).write_bytes(gzip.compress(b'{"prompt": "a"}\n' * 4) + damaged)
        with pytest.raises(InputError, match=rf"{name}:5: broken gzip file: Error -3"):
            list(read_records(tmp_path / name))


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json"])
def test_a_file_that_may_not_be_read(tmp_path, name, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    (tmp_path / name).write_text("{}\n")
    monkeypatch.setattr("builtins.open", refused)  # by mode it would not be refused to root
    with pytest.raises(InputError, match=rf"{name}:1: cannot be read: Permission denied"):
        list(read_records(tmp_path / name))


def test_a_folder_that_may_not_be_entered(tmp_path, monkeypatch):
    def refused(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.is_file", refused)
    with pytest.raises(InputError, match=r"p\.json: cannot be read: Permission denied"):
        list(read_records(tmp_path / "p.json"))


def test_missing_file_unknown_suffix_broken_parquet(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        list(read_records(tmp_path / "absent.jsonl"))
    (tmp_path / "p.csv").write_text("a,b\n")
    with pytest.raises(InputError, match=r"expected one of \.jsonl"):
        list(read_records(tmp_path / "p.csv"))
    (tmp_path / "p.parquet").write_bytes(b"PAR1 not really PAR1")
    with pytest.raises(InputError, match="not a readable Parquet"):
        list(read_records(tmp_path / "p.parquet"))
