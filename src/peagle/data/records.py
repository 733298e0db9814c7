"""Rows of a prompt file, each with the place it came from, so that an error can name the line."""

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from peagle.errors import InputError

Record = dict[str, Any]
SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")


def read_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield (place, row) of a .jsonl, .json (a list, or an object holding one) or .parquet file, gzipped or not.

    `place` reads "FILE:LINE" for .jsonl, "FILE: entry N" for .json and "FILE: row N" for Parquet, all from 1.

    Raises:
        InputError: no such file, unknown suffix, an empty or unreadable file, or text that is not what the suffix says.
    """
    path = Path(path)
    try:
        is_there = path.is_file()
    except OSError as error:  # a folder above it that may not be entered
        raise InputError(f"prompt file {path}: cannot be read: {error.strerror or error}") from error
    if not is_there:
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


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its end) as bytes, so that a line that is not text can be named."""
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                yield number, line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}:{number + 1}: broken gzip file: {error}") from error
    except OSError as error:
        raise InputError(f"{path}:{number + 1}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, content: bytes, first_line: int = 1) -> Any:
    """JSON from bytes that begin at line `first_line` of the file."""
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = first_line + content[: error.start].count(b"\n")
        raise InputError(f"{path}:{line}: not UTF-8 text: {error.reason}") from error
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise InputError(f"{path}:{line}: not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, and brackets as deep
        raise InputError(f"{path}:{first_line}: not JSON that can be read: {error}") from error


def _read_json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in _lines(path):
        if line.strip():
            yield f"{path}:{number}", _parse(path, line.rstrip(), number)


def _read_json(path: Path) -> Iterator[tuple[str, Any]]:
    content = b"".join(line for _number, line in _lines(path))
    if not content.strip():
        raise InputError(f"prompt file {path}: empty file")
    data = _parse(path, content)
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
