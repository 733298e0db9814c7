"""Prompts that a server refused, in a file of their own beside the answers: not asked again unless that is wanted."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

from peagle.data.prompts import Prompt
from peagle.data.request_queue import Refusal
from peagle.errors import InputError

REFUSED_GLOB = "refused*.jsonl"


class RefusalFile:
    """`refused.jsonl` of a folder, or `refused-PREFIX.jsonl` of a process among several.

    Attributes:
        before: temperatures at which each prompt id had been refused when this was opened, over all such files.
    """

    def __init__(self, folder: Path, prefix: str = "", ask_again: bool = False):
        """ask_again: forget what was refused before, of all processes where this is the only one."""
        self.path = folder / (f"refused-{prefix}.jsonl" if prefix else "refused.jsonl")
        if ask_again:
            for path in [self.path] if prefix else list(folder.glob(REFUSED_GLOB)):
                path.unlink(missing_ok=True)
        self.before = read_refused(folder) if not ask_again else {}

    def add(self, prompt: Prompt, temperature: float, turn: int, refusal: Refusal) -> None:
        """Append one line at once. turn: from 1, the user turn whose answer was refused.

        Raises:
            InputError: the file cannot be written.
        """
        row = {"prompt_id": prompt.prompt_id, "source": prompt.source, "temperature": temperature, "turn": turn}
        row |= {"status": refusal.status, "message": refusal.message}
        try:
            with open(self.path, "ab+") as file:
                if file.tell():
                    file.seek(-1, 2)
                    if file.read(1) != b"\n":  # a kill cut the last line short
                        file.write(b"\n")
                file.write((json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise InputError(f"{self.path}: cannot be written: {error}") from error


def read_refused(folder: Path) -> dict[str, set[float]]:
    """Temperatures at which each prompt id is listed as refused; a line that a kill cut short is passed over."""
    found: dict[str, set[float]] = defaultdict(set)
    for path in sorted(folder.glob(REFUSED_GLOB)):
        for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
            try:
                row = json.loads(line)
                found[str(row["prompt_id"])].add(round(float(row["temperature"]), 4))
            except (ValueError, KeyError, TypeError):
                continue
    return dict(found)
