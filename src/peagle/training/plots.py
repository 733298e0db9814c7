"""Loss and accuracy curves of a run, from its metrics.jsonl."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any


def plot_run(folder: Path) -> Path | None:
    """Write folder/curves.png; None where matplotlib is not installed, nothing was logged, or it cannot be written.

    Only warns then: the head is there.
    """
    work = folder / "curves.png.tmp"
    try:
        return _plot(folder, work)
    except Exception as error:  # a full disk, a damaged log, whatever matplotlib raises
        warnings.warn(f"{folder / 'curves.png'} cannot be drawn ({error})", stacklevel=2)
        with suppress(OSError):
            work.unlink(missing_ok=True)
        return None


def _plot(folder: Path, work: Path) -> Path | None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    checks = [line for line in lines if "validation_loss" in line]
    if not steps:
        return None
    figure = Figure(figsize=(12, 4), layout="constrained")
    loss, accuracy, length = figure.subplots(1, 3)
    loss.plot([line["step"] for line in steps], [line["loss"] for line in steps], label="training", linewidth=1)
    if checks:
        loss.plot([line["step"] for line in checks], [line["validation_loss"] for line in checks], label="validation")
    loss.set(xlabel="step", ylabel="loss", yscale="log")
    loss.legend()
    shown, name = (checks, "validation_accuracy") if checks else (steps, "accuracy")
    for depth in range(len(shown[0][name])):
        accuracy.plot([line["step"] for line in shown], [line[name][depth] for line in shown], label=str(depth))
    accuracy.set(xlabel="step", ylabel=f"top-1 by depth ({'validation' if checks else 'training'})", ylim=(0, 1))
    accuracy.legend(title="depth", ncols=2)
    for key, label in (
        ("validation_acceptance_length", "all"),
        ("validation_acceptance_length_without_loops", "without repeating text"),
    ):
        points: list[dict[str, Any]] = [line for line in checks if key in line]
        length.plot([line["step"] for line in points], [line[key] for line in points], label=label)
    length.set(xlabel="step", ylabel="acceptance length (validation)")
    if checks:
        length.legend()
    figure.savefig(work, format="png", dpi=120)
    os.replace(work, folder / "curves.png")
    return folder / "curves.png"
