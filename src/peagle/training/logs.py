"""Logs of a run: metrics.jsonl, TensorBoard where it is installed, and the progress bar."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from peagle.errors import InputError


class MetricsLog:
    """One JSON object a line, `step` in each; opened for a run that continues after `step` and was last validated at
    step `validated_at`."""

    def __init__(self, folder: Path, step: int, validated_at: int, tensorboard: bool) -> None:
        self.path = folder / "metrics.jsonl"
        if self.path.exists():
            self._forget_after(step, validated_at)
        self.file = open(self.path, "a")  # noqa: SIM115 - closed by close()
        self.board: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)

    def _forget_after(self, step: int, validated_at: int) -> None:
        """Drop lines of steps that a killed run did after its last checkpoint; they are done again."""
        kept = []
        for line in self.path.read_text().splitlines():
            try:
                values = json.loads(line)
                # a validation may have come between a step's checkpoint and the kill; it is done again too
                if values["step"] <= (validated_at if "validation_loss" in values else step):
                    kept.append(line + "\n")
            except (json.JSONDecodeError, KeyError, TypeError):
                continue  # a line cut short by the kill
        work = self.path.with_suffix(".jsonl.tmp")
        work.write_text("".join(kept))
        os.replace(work, self.path)

    def write(self, values: dict[str, Any]) -> None:
        """Add a line. Raises InputError when it cannot be written (a full disk)."""
        try:
            self.file.write(json.dumps(values) + "\n")
            self.file.flush()
            self._draw(values)
        except OSError as error:
            raise InputError(f"output: {self.path.parent} cannot be logged to ({error.strerror or error})") from error

    def _draw(self, values: dict[str, Any]) -> None:
        if self.board is None:
            return
        for name, value in values.items():
            if isinstance(value, int | float) and name != "step":
                self.board.add_scalar(name, value, values["step"])
            elif isinstance(value, list) and name.endswith("accuracy"):
                for depth, item in enumerate(value):
                    if item is not None:
                        self.board.add_scalar(f"{name}/depth_{depth}", item, values["step"])

    def close(self) -> None:
        # both try once more to write what a full disk has refused; `write` has said so
        with suppress(OSError):
            self.file.close()
        if self.board is not None:
            with suppress(OSError):
                self.board.close()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file, complete or not at all."""
    work = path.with_name(path.name + ".tmp")
    work.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(work, path)
