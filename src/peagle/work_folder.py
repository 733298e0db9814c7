"""Folders that appear under their name when they are complete, or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from peagle.errors import InputError


@contextmanager
def work_folder(final: Path, refusal: str) -> Iterator[Path]:
    """A folder beside `final`, to be filled and moved there; what the block leaves of it is taken away.

    Raises InputError, `refusal` and what happened, where the system refuses to write.
    """
    work: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
        yield work
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise InputError(f"{refusal} ({error})") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
