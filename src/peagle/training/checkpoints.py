"""Checkpoints of a run: complete or absent, newest first, damaged ones passed over."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from peagle.errors import InputError

STATE = "state.pt"


def checkpoint_folders(folder: Path) -> list[Path]:
    """`step-*` folders, newest first."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir()), reverse=True)


def save_checkpoint(folder: Path, step: int, state: dict[str, Any], keep: int) -> Path:
    """Write `state` as folder/step-NNNNNNNN, then drop all but it and the `keep` - 1 before it. Raises InputError on a
    full disk."""
    final = folder / f"step-{step:08d}"
    work: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".writing-*"):  # of a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        work = Path(tempfile.mkdtemp(prefix=".writing-", dir=folder))
        with open(work / STATE, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        if final.exists():  # aside in one move: a kill must not leave a half-deleted one under a checkpoint's name
            os.replace(final, work / "before")
        os.replace(work, final)
        shutil.rmtree(final / "before", ignore_errors=True)
    except (OSError, RuntimeError) as error:  # torch reports a full disk as RuntimeError
        raise InputError(f"output: checkpoint {final} cannot be written ({error})") from error
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)
    # newer ones were passed over as damaged when the run went on; they must not push out what can be read
    for old in [path for path in checkpoint_folders(folder) if path.name <= final.name][keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def load_latest(folder: Path) -> dict[str, Any] | None:
    """The newest checkpoint that can be read, tensors on the CPU; None when there is none."""
    for path in checkpoint_folders(folder):
        try:
            with zipfile.ZipFile(path / STATE) as archive:  # torch.load itself does not look at the checksums
                if (damaged := archive.testzip()) is not None:
                    raise ValueError(f"the checksum of {damaged} is wrong")
            return torch.load(path / STATE, map_location="cpu", weights_only=True)
        except Exception as error:  # damage shows up as many types
            warnings.warn(f"checkpoint {path} cannot be read and is passed over ({error})", stacklevel=2)
    return None
