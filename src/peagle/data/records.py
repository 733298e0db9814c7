"""Rows of a prompt file, each with the place it came from, so that an error can name the line."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from peagle.errors import InputError

Record = dict[str, Any]
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield (place, row) of a .jsonl, .json (a list, or an object holding one) or .parquet file, gzipped or not.

    `place` reads "FILE:LINE" for .jsonl, "FILE: entry N" for .json and "FILE: row N" for Parquet, all from 1.

    Raises:
        InputError: no such file, unknown suffix, an empty file, or text that is not what the suffix says.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"prompt file {path}: no such file")
    if not path.name.endswith(SUFFIXES):
        raise InputError(f"prompt file {path}: expected one of {', '.join(SUFFIXES)}")
    reader = _read_parquet if path.suffix == ".parquet" else _read_json_lines if ".jsonl" in path.name else _read_json
    found = False
    for place, row in reader(path):
        if not isinstance(row, dict):
            raise InputError(f"{place}: expected a JSON object, got {type(row).__name__}")
        found = True
        yield place, row
    if not found:
        raise InputError(f"prompt file {path}: no rows in it")


def _open_text(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    number = 0
    try:
        with _open_text(path) as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield f"{path}:{number}", json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}:{number + 1}: not UTF-8 text: {error.reason}") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise InputError(f"{path}:{number + 1}: broken gzip file: {error}") from error


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with _open_text(path) as file:
            text = file.read()
        if not text.strip():
            raise InputError(f"prompt file {path}: empty file")
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error.reason}") from error
    except (EOFError, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: broken gzip file: {error}") from error
    if isinstance(data, dict):
        lists = [value for value in data.values() if isinstance(value, list)]
        if len(lists) != 1:
            raise InputError(f"{path}: expected a list of rows, or an object holding exactly one; found {len(lists)}")
        data = lists[0]
    if not isinstance(data, list):
        raise InputError(f"{path}: expected a list of rows, got {type(data).__name__}")
    for number, row in enumerate(data, start=1):
        yield f"{path}: entry {number}", row


def _read_parquet(path: Path) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"{path}: row {number + 1}: not a readable Parquet file: {error}") from error
