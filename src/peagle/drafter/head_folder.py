"""Which existing folders a head may be written to: those of heads, so that nothing else is lost with them."""

from __future__ import annotations

import filecmp
import os
from fnmatch import fnmatchcase
from pathlib import Path

from peagle.drafter.draft_vocabulary import FILE
from peagle.drafter.layouts import parse_config
from peagle.drafter.loading import read_json
from peagle.errors import InputError

# What heads' folders hold: the head, what training notes of its run, and what the Hub keeps beside a model.
HEADS_FILES = (
    *("config.json", "*.safetensors", "*.safetensors.index.json", FILE),
    *("metrics.jsonl", "run.json", "run-*.json"),
    *("README*", "LICENSE*", "NOTICE*", "USE_POLICY*", ".gitattributes", ".gitignore"),
)


def check_heads_config(folder: Path) -> None:
    """Refuse a folder whose config.json, or safetensors without one, are not a head's. Raises InputError."""
    path = folder / "config.json"
    if not os.path.lexists(path):
        if any(folder.glob("*.safetensors")):
            raise InputError(f"output: {folder} holds weights without a config.json, expected a head's folder or none")
        return
    try:
        parse_config(read_json(path))
    except (InputError, OSError, ValueError, RecursionError) as error:
        raise InputError(f"output: {folder} is not a head's folder, it is not replaced ({error})") from error


def check_replaceable(folder: Path, source: Path) -> None:
    """Refuse to replace an existing folder as a whole by a head made of `source`, unless it is a head's and holds
    nothing that would be lost: only what heads have, and copies of the source's files. Raises InputError."""
    if not folder.is_dir():
        raise InputError(f"output: {folder} is not a folder, it is not replaced")
    entries = sorted(folder.iterdir())
    if entries and not (folder / "config.json").is_file():
        raise InputError(f"output: {folder} is not a head's folder (no config.json), it is not replaced")
    if entries:
        check_heads_config(folder)
    foreign = [entry for entry in entries if not _may_go(entry, source)]
    if foreign:
        names = ", ".join(entry.name + ("/" if entry.is_dir() else "") for entry in foreign[:5])
        more = f" and {len(foreign) - 5} more" if len(foreign) > 5 else ""
        raise InputError(
            f"output: {folder} holds what is no part of a head ({names}{more}), it is not replaced: expected another "
            "folder, or these moved away"
        )


def check_apart(source: Path, output: Path) -> None:
    """Refuse an output that is the head's folder, holds it or lies in it, by whatever name. Raises InputError."""
    head, place = source.resolve(), output.resolve()
    if _same(head, place):
        raise InputError(f"output: {output} is the head itself, expected another folder")
    if any(_same(parent, place) for parent in head.parents):
        raise InputError(f"output: {output} contains the head {source}, expected a folder apart from it")
    if any(_same(parent, head) for parent in place.parents):
        raise InputError(f"output: {output} lies in the head {source}, expected a folder apart from it")


def _same(a: Path, b: Path) -> bool:
    """As the file system sees it, where two spellings may be one folder."""
    return a == b or (a.exists() and b.exists() and a.samefile(b))


def _may_go(entry: Path, source: Path) -> bool:
    if not entry.is_file():
        return False
    if any(fnmatchcase(entry.name, pattern) for pattern in HEADS_FILES):
        return True
    twin = source / entry.name
    return twin.is_file() and filecmp.cmp(entry, twin, shallow=False)
