"""Writing answer shards: complete or not there at all, and findable by a rerun and by processes side by side."""

import errno
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from peagle.data.dataset import (
    DIGEST_KEY,
    FACTS_DIGEST_KEY,
    SCHEMA,
    content_digest,
    facts_digest,
    read_facts,
    shard_files,
)
from peagle.data.metadata import FORMAT_VERSION, METADATA_FILE, check_same_target, read_metadata
from peagle.errors import InputError
from peagle.work_folder import remove_stale, temporary_name, work_folder


@dataclass(frozen=True, slots=True)
class Answer:
    """One row: a conversation's token ids, where the target answered in it, and how the row came about."""

    input_ids: list[int]
    answer_mask: list[bool]
    source: str
    temperature: float
    finish_reason: str
    prompt_id: str


class ShardWriter:
    """Collects rows and writes a shard every `rows` of them, or when `seconds` have passed since the last one."""

    def __init__(self, folder: Path, prefix: str = "", rows: int = 4096, seconds: float = 300.0):
        self.folder = folder
        self.stem = f"answers-{prefix}-" if prefix else "answers-"
        self.rows = rows
        self.seconds = seconds
        self._pending: list[Answer] = []
        self._next: Path | None = None
        self._written_at = time.monotonic()

    def add(self, answer: Answer) -> None:
        """Keep a row, and write a shard if one is due.

        Raises:
            InputError: the disk is full, or the folder cannot be written.
        """
        self._pending.append(answer)
        if len(self._pending) >= self.rows or time.monotonic() - self._written_at > self.seconds:
            self.flush()

    def flush(self) -> None:
        """Write what is pending as one shard; nothing if nothing is. After an interrupt the next call writes the same
        shard again, so that no row is in two."""
        if self._pending:
            self._next = self._next or self._free_name()
            write_shard(self._next, self._pending)
            self._pending = []
        self._next = None
        self._written_at = time.monotonic()

    def _free_name(self) -> Path:
        taken = [path.stem.rpartition("-") for path in self.folder.glob(f"{self.stem}*.parquet")]
        numbers = [int(tail) for head, _, tail in taken if head + "-" == self.stem and tail.isdecimal()]
        return self.folder / f"{self.stem}{max(numbers, default=-1) + 1:05d}.parquet"


def write_shard(path: Path, answers: list[Answer]) -> None:
    """Write rows as one Parquet file, zstd-compressed, under its name only when it is complete.

    Raises:
        InputError: the disk is full, or the folder cannot be written.
    """
    columns = {name: [getattr(answer, name) for answer in answers] for name in SCHEMA.names}
    table = pyarrow.Table.from_pydict(columns, schema=SCHEMA)
    offsets = np.concatenate([[0], np.cumsum([len(answer.input_ids) for answer in answers])])
    ids = np.concatenate([np.asarray(answer.input_ids, np.int32) for answer in answers])
    mask = np.concatenate([np.asarray(answer.answer_mask, np.bool_) for answer in answers])
    digests = {DIGEST_KEY: content_digest(ids, mask, offsets), FACTS_DIGEST_KEY: facts_digest(table)}
    table = table.replace_schema_metadata({key: digest.encode() for key, digest in digests.items()})
    with replacing(path) as temporary:
        pyarrow.parquet.write_table(table, temporary, compression="zstd")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name beside `path` that becomes `path` if the block succeeds and is deleted if it does not.

    Raises:
        InputError: for an operating-system error in the block, such as a full disk.
    """
    temporary = temporary_name(path)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise InputError(f"{path}: no space left on the disk; free some and run the same command again") from error
        raise InputError(f"{path}: cannot be written: {error}") from error
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A work folder beside `path` that becomes `path` if the block succeeds and is deleted if it does not.

    Raises:
        InputError: `path` is a file or holds something, or an operating-system error such as a full disk.
    """
    path = path.resolve()  # the work folder has to be on the same disk, and a link stays what it is
    refusal = f"{path}: cannot be written"
    try:
        if path.exists() and not path.is_dir():
            raise InputError(f"{path}: is a file; expected a new folder")
        if path.is_dir() and any(path.iterdir()):
            what = "holds a data set already" if (path / METADATA_FILE).exists() else "is not empty"
            raise InputError(f"{path}: {what}; expected a new folder")
    except OSError as error:
        raise InputError(f"{refusal} ({error})") from error
    with work_folder(path, refusal) as work:
        yield work
        os.chmod(work, 0o755)
        os.replace(work, path)


def answered_prompts(folder: Path) -> dict[str, set[float]]:
    """Temperatures at which each prompt id has been answered in the folder's shards.

    Raises:
        InputError: a corrupt shard; it is named.
    """
    done: dict[str, set[float]] = defaultdict(set)
    for path in shard_files(folder):
        table = read_facts(path)
        for key, temperature in zip(table["prompt_id"].to_pylist(), table["temperature"].to_numpy(), strict=True):
            done[key].add(round(float(temperature), 4))
    return done


def prepare_folder(folder: Path, target: dict[str, Any], generation: dict[str, Any]) -> list[dict[str, Any]]:
    """Create the folder and `dataset.json`, or add `generation` to an existing one of the same target. What a killed
    process was writing there is taken away.

    Returns the generations that were there before.

    Raises:
        InputError: the folder holds another target's answers, or cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder}: cannot be created: {error}") from error
    remove_stale(folder)
    with _locked(folder):
        metadata: dict[str, Any] = {"format_version": FORMAT_VERSION, "target": target, "generation": []}
        if (folder / METADATA_FILE).exists():
            existing = read_metadata(folder)
            check_same_target(metadata, existing, "this run", str(folder))
            metadata = existing
        elif shard_files(folder):
            raise InputError(f"{folder}: holds shards but no {METADATA_FILE}; expected a new or a complete folder")
        before = list(metadata["generation"])
        if generation not in before:
            metadata["generation"].append(generation)
        write_metadata(folder, metadata)
    return before


def write_counts(folder: Path) -> None:
    """Bring the row count in `dataset.json` up to date."""
    with _locked(folder):
        metadata = read_metadata(folder)
        rows = sum(pyarrow.parquet.read_metadata(path).num_rows for path in shard_files(folder))
        write_metadata(folder, {**metadata, "counts": {"examples": rows, "shards": len(shard_files(folder))}})


def write_metadata(folder: Path, metadata: dict[str, Any]) -> None:
    """Replace `dataset.json` in one step."""
    with replacing(folder / METADATA_FILE) as temporary:
        temporary.write_text(json.dumps(metadata, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that processes side by side do not lose each other's change to `dataset.json`."""
    try:
        import fcntl
    except ImportError:  # Windows: one process at a time there
        yield
        return
    with open(folder / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
