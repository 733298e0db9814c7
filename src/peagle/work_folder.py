"""Files and folders that appear under their name when they are complete, or not at all.

Until then they are called `.NAME.HOST-PROCESS.ENDING`, so that what a killed process left is known for that.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from safetensors import SafetensorError

from peagle.errors import InputError


@contextmanager
def work_folder(final: Path, refusal: str) -> Iterator[Path]:
    """A folder beside `final`, to be filled and moved there; what the block leaves of it is taken away, and before it
    what killed processes left.

    Raises InputError, `refusal` and what happened, where the system refuses to write.
    """
    work: Path | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_stale(final.parent, final.name)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.{_mark()}.", dir=final.parent))
        yield work
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
        raise InputError(f"{refusal} ({error})") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def temporary_name(final: Path) -> Path:
    """What a file beside `final` is called until this process has written it."""
    return final.with_name(f".{final.name}.{_mark()}.tmp")


def remove_stale(folder: Path, name: str | None = None) -> None:
    """Take away what processes that are gone were still writing in `folder`: all of it, or what was to be `name`.

    What a process of another host or container writes is left alone, for nobody here can say whether it lives.
    """
    with suppress(OSError):
        for path in folder.iterdir():
            found = re.fullmatch(r"\.(.+)\.([0-9a-f]{8})-(\d+)\.\w+", path.name)
            if found is None or found[2] != _host() or name not in (None, found[1]) or _lives(int(found[3])):
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _mark() -> str:
    return f"{_host()}-{os.getpid()}"


@cache
def _host() -> str:
    """Eight digits for where process numbers mean the same: the host, and the container within it."""
    numbers = ""
    with suppress(OSError):  # Linux alone has it
        numbers = os.readlink("/proc/self/ns/pid")
    return hashlib.sha256(f"{socket.gethostname()} {numbers}".encode()).hexdigest()[:8]


def _lives(process: int) -> bool:
    """Whether there is such a process; where that cannot be asked, yes."""
    if os.name != "posix":  # on Windows, signal 0 would be Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
