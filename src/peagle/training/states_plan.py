"""Cached hidden states: a folder of safetensors shards beside `states.json`.

A shard holds whole documents one after another: `aux` [T, S H] (S auxiliary layers side by side) and `hidden` [T, H]
(the LM head's input), as bf16, or as fp8 (e4m3) with `scale` [T, S + 1] float32: one scale a token and state. Beside
each finished shard lies its SHA-256, in the form that `sha256sum -c` reads. A shard is complete or not there.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from peagle.errors import InputError

FORMAT_VERSION = 1
PLAN_FILE = "states.json"
StoredDtype = Literal["bf16", "fp8"]
DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


@dataclass(frozen=True)
class StatesPlan:
    """What a folder of states holds, or will hold: `states.json`. Documents are indices into the data set."""

    target: str
    target_fingerprint: str
    data: str  # the data set's fingerprint
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    dtype: StoredDtype
    computed_in: str  # the target's dtype
    max_length: int  # longer documents are cut
    shards: tuple[tuple[int, ...], ...]  # documents of each shard
    lengths: tuple[tuple[int, ...], ...]  # their tokens

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's states."""
        states = len(self.aux_layer_ids) + 1
        return states * (self.hidden_size * DTYPES[self.dtype].itemsize + (4 if self.dtype == "fp8" else 0))

    @property
    def tokens(self) -> int:
        return sum(map(sum, self.lengths))

    def file(self, folder: Path, shard: int) -> Path:
        return folder / f"states-{shard:05d}.safetensors"

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION} | asdict(self)) + "\n"


def read_plan(folder: Path) -> StatesPlan:
    """`states.json` of a folder. Raises InputError when it is missing, broken or of another version."""
    file = folder / PLAN_FILE
    if not file.is_file():
        raise InputError(
            f"hidden_states: no {PLAN_FILE} in {folder}, expected a folder written by `peagle data hidden-states`"
        )
    try:
        content = json.loads(file.read_text())
        version = content.pop("format_version")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError) as error:
        raise InputError(f"hidden_states: {file} is no plan of hidden states ({error})") from error
    if version != FORMAT_VERSION:
        raise InputError(f"hidden_states: {file} has format_version {version!r}, expected {FORMAT_VERSION}")
    try:
        for name in ("shards", "lengths"):
            content[name] = tuple(map(tuple, content[name]))
        content["aux_layer_ids"] = tuple(content["aux_layer_ids"])
        return StatesPlan(**content)
    except (TypeError, KeyError) as error:
        raise InputError(f"hidden_states: {file} is no plan of hidden states ({error})") from error


def checksum_file(shard: Path) -> Path:
    return shard.with_suffix(".sha256")


def is_finished(shard: Path) -> bool:
    """The checksum is written after the shard."""
    return shard.is_file() and checksum_file(shard).is_file()


def file_digest(file: Path) -> str:
    with open(file, "rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def written_digest(shard: Path) -> str:
    """The digest beside a shard, empty when there is none."""
    try:
        text = checksum_file(shard).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
    found = re.match(r"[0-9a-f]{64}\b", text)
    return found.group() if found else ""
