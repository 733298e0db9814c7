"""A result as a JSON file, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from peagle.errors import InputError


def check_writable(path: Path, flag: str = "--json") -> None:
    """Refuse a place that a result could not be written to, before the work of producing it begins."""
    if path.is_dir():
        raise InputError(f"{flag}: {path} is a folder, expected a file name")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise InputError(f"{flag}: the folder {folder} does not exist")
    if not os.access(folder, os.W_OK):
        raise InputError(f"{flag}: no permission to write in {folder}")


def write_json(path: Path, content: Any, flag: str = "--json") -> None:
    """Write `content` beside `path` and move it there when complete. Raises InputError where that is impossible."""
    check_writable(path, flag)
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    work: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.absolute().parent, prefix=f".{path.name}.", delete=False
        ) as file:
            work = Path(file.name)
            file.write(text)
        os.chmod(work, 0o644)  # temporary files are made 0600
        os.replace(work, path)
    except OSError as error:
        if work is not None:
            work.unlink(missing_ok=True)
        raise InputError(f"{flag}: {path} cannot be written ({error.strerror or error})") from error
