"""Answers on disk: a folder of Parquet shards beside `dataset.json`, and its reader.

Columns: input_ids list<int32>, answer_mask list<bool> (true where the target wrote the token as an answer), source
string, temperature float32, finish_reason string, prompt_id string. `dataset.json` names the target, its vocabulary
size, fingerprints of tokenizer and chat template, and how the answers were made.
"""

import hashlib
import json
import warnings
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from peagle.data.metadata import (
    check_same_target,
    read_metadata,
    template_fingerprint,
    tokenizer_fingerprint,
)
from peagle.errors import InputError

SHARD_GLOB = "answers-*.parquet"
DIGEST_KEY = b"peagle.digest"  # of the tokens and the mask
FACTS_DIGEST_KEY = b"peagle.digest.facts"  # of the other columns; earlier versions wrote none
FACTS = ["source", "temperature", "finish_reason", "prompt_id"]
SCHEMA = pyarrow.schema(
    [
        ("input_ids", pyarrow.list_(pyarrow.int32())),
        ("answer_mask", pyarrow.list_(pyarrow.bool_())),
        ("source", pyarrow.string()),
        ("temperature", pyarrow.float32()),
        ("finish_reason", pyarrow.string()),
        ("prompt_id", pyarrow.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation: token ids [L] int32, and which of them the target wrote as answers, [L] bool."""

    input_ids: np.ndarray
    answer_mask: np.ndarray


@dataclass(frozen=True, slots=True)
class _Shard:
    input_ids: np.ndarray
    answer_mask: np.ndarray
    offsets: np.ndarray

    @property
    def size(self) -> int:
        return self.input_ids.nbytes + self.answer_mask.nbytes + self.offsets.nbytes


class AnswerDataset:
    """Reader of one or several answer folders; shards are decoded when needed and kept up to `cache_bytes`.

    Attributes:
        lengths: tokens of each example, [N] int64.
        answer_lengths: answer tokens of each example, [N] int64.
        sources, prompt_ids, finish_reasons: one string an example.
        temperatures: [N] float32.
        metadata: the (first) folder's dataset.json.
        fingerprint: SHA-256 over the contents in order; two data sets with the same one hold the same examples.
    """

    def __init__(self, folders: Sequence[Path], cache_bytes: int = 4 << 30):
        self.folders = list(folders)
        self.metadata = read_metadata(folders[0])
        self._cache_bytes = cache_bytes
        self._cache: OrderedDict[int, _Shard] = OrderedDict()
        for folder in folders[1:]:
            check_same_target(read_metadata(folder), self.metadata, f"{folder}", f"{folders[0]}")
        self.shards = [shard for folder in folders for shard in shard_files(folder)]
        if not self.shards:
            raise InputError(f"{folders[0]}: no {SHARD_GLOB} in it; `peagle data generate` has written nothing yet")
        lengths, answered, digests = [], [], []
        self.sources: list[str] = []
        self.prompt_ids: list[str] = []
        self.finish_reasons: list[str] = []
        temperatures: list[np.ndarray] = []
        for number, path in enumerate(self.shards):
            shard = self._shard(number)
            lengths.append(np.diff(shard.offsets))
            sums = np.concatenate([[0], np.cumsum(shard.answer_mask)])
            answered.append(sums[shard.offsets[1:]] - sums[shard.offsets[:-1]])
            table = read_facts(path)
            self.sources += table["source"].to_pylist()
            self.prompt_ids += table["prompt_id"].to_pylist()
            self.finish_reasons += table["finish_reason"].to_pylist()
            temperatures.append(table["temperature"].to_numpy())
            digests.append(content_digest(shard.input_ids, shard.answer_mask, shard.offsets))
        self.lengths = np.concatenate(lengths).astype(np.int64)
        self.answer_lengths = np.concatenate(answered).astype(np.int64)
        self.temperatures = np.concatenate(temperatures).astype(np.float32)
        self._starts = np.concatenate([[0], np.cumsum([len(part) for part in lengths])])
        self.fingerprint = hashlib.sha256("".join(digests).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Example:
        if not -len(self) <= index < len(self):
            raise IndexError(f"example {index} of a data set of {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        shard, row = self._shard(number), index - self._starts[number]
        span = slice(int(shard.offsets[row]), int(shard.offsets[row + 1]))
        return Example(shard.input_ids[span], shard.answer_mask[span])

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """How often each token id occurs in answers, [vocab_size] int64.

        Raises:
            InputError: an answer holds an id outside the vocabulary.
        """
        counts = np.zeros(vocab_size, np.int64)
        for number, path in enumerate(self.shards):
            shard = self._shard(number)
            tokens = shard.input_ids[shard.answer_mask]
            if tokens.size and int(tokens.max()) >= vocab_size:
                raise InputError(f"{path}: token id {tokens.max()} is outside the vocabulary of {vocab_size}")
            counts += np.bincount(tokens, minlength=vocab_size)
        return counts

    def check_target(self, tokenizer: Any, vocab_size: int | None = None) -> None:
        """Refuse a target whose tokenizer is not the one that the answers are written in.

        A chat template that differs is only warned about: the tokens are still the target's own.

        Raises:
            InputError: another tokenizer or vocabulary size; both targets are named.
        """
        made_by = self.metadata["target"]
        if vocab_size is not None and vocab_size != made_by["vocab_size"]:
            raise InputError(
                f"{self.folders[0]}: made with {made_by['name']} (vocab_size {made_by['vocab_size']}); "
                f"this target's vocab_size is {vocab_size}"
            )
        if tokenizer_fingerprint(tokenizer) != made_by["tokenizer"]:
            raise InputError(
                f"{self.folders[0]}: made with the tokenizer of {made_by['name']}; this target has another"
            )
        if template_fingerprint(tokenizer) != made_by["chat_template"]:
            warnings.warn(f"{self.folders[0]}: made with another chat template than this target's", stacklevel=2)

    def _shard(self, number: int) -> _Shard:
        shard = self._cache.get(number)
        if shard is None:
            shard = _decode(self.shards[number], self.metadata["target"]["vocab_size"])
            self._cache[number] = shard
            while len(self._cache) > 1 and sum(kept.size for kept in self._cache.values()) > self._cache_bytes:
                self._cache.popitem(last=False)
        self._cache.move_to_end(number)
        return shard


def open_dataset(path: str | Path | Sequence[str | Path], cache_bytes: int = 4 << 30) -> AnswerDataset:
    """Open one folder of answers, or several made by the same target as one data set.

    Raises:
        InputError: no such folder, a broken `dataset.json`, a corrupt shard (named), or folders of different targets.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise InputError("open_dataset: no folder given")
    return AnswerDataset([Path(one) for one in paths], cache_bytes)


def shard_files(folder: Path) -> list[Path]:
    """The folder's finished shards, by name."""
    return sorted(folder.glob(SHARD_GLOB))


def content_digest(input_ids: np.ndarray, answer_mask: np.ndarray, offsets: np.ndarray) -> str:
    """Hash of a shard's tokens [T], answer mask [T] and example boundaries [N+1]."""
    digest = hashlib.sha256()
    digest.update(np.ascontiguousarray(offsets, np.int64).tobytes())
    digest.update(np.ascontiguousarray(input_ids, np.int32).tobytes())
    digest.update(np.packbits(np.ascontiguousarray(answer_mask, np.bool_)).tobytes())
    return digest.hexdigest()


def facts_digest(table: pyarrow.Table) -> str:
    """Hash of a shard's columns beside the tokens."""
    columns = [table[name].to_pylist() for name in FACTS]
    return hashlib.sha256(json.dumps(columns).encode()).hexdigest()


def read_facts(path: Path) -> pyarrow.Table:
    """A shard's columns beside the tokens, as they were written.

    Raises:
        InputError: the file is corrupt, or not such a shard; it is named.
    """
    table = read_shard(path, FACTS)
    written = (table.schema.metadata or {}).get(FACTS_DIGEST_KEY)
    if written is not None and written != facts_digest(table).encode():
        raise InputError(f"{path}: corrupt shard: its {', '.join(FACTS)} do not match the digest written with them")
    return table


def read_shard(path: Path, columns: list[str] | None = None) -> pyarrow.Table:
    """A shard's table, with the columns of SCHEMA.

    Raises:
        InputError: the file is corrupt, or not such a shard; it is named.
    """
    try:
        table = pyarrow.parquet.ParquetFile(path).read(columns)
        table.validate(full=True)  # texts that are none, offsets that lead nowhere
        names = table.column_names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: corrupt shard, delete it and run `peagle data generate` again: {error}") from error
    for name in columns or SCHEMA.names:
        if name not in names or not _same_type(table.schema.field(name).type, SCHEMA.field(name).type):
            raise InputError(f"{path}: column {name!r} is missing or not {SCHEMA.field(name).type}")
    return table


def _same_type(mine: pyarrow.DataType, expected: pyarrow.DataType) -> bool:
    if pyarrow.types.is_list(mine) and pyarrow.types.is_list(expected):
        return bool(mine.value_type == expected.value_type)  # writers differ in how they name a list's items
    return bool(mine == expected)


def _decode(path: Path, vocab_size: int) -> _Shard:
    table = read_shard(path, ["input_ids", "answer_mask"])
    ids, mask = (table[name].combine_chunks() for name in ("input_ids", "answer_mask"))
    if isinstance(ids, pyarrow.ChunkedArray):
        ids, mask = (pyarrow.concat_arrays(column.chunks) for column in (ids, mask))
    offsets = np.asarray(ids.offsets, np.int64)
    if not np.array_equal(offsets, np.asarray(mask.offsets, np.int64)):
        raise InputError(f"{path}: corrupt shard: input_ids and answer_mask differ in length")
    shard = _Shard(
        np.asarray(ids.flatten(), np.int32), mask.flatten().to_numpy(zero_copy_only=False).astype(np.bool_), offsets
    )
    written = (table.schema.metadata or {}).get(DIGEST_KEY)
    if written is not None and written != content_digest(shard.input_ids, shard.answer_mask, offsets).encode():
        raise InputError(f"{path}: corrupt shard: its contents do not match the digest written with them")
    if shard.input_ids.size and not 0 <= shard.input_ids.min() <= shard.input_ids.max() < vocab_size:
        raise InputError(f"{path}: token ids outside the vocabulary of {vocab_size}")
    return shard
