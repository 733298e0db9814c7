"""A group's self-written prompts on disk: the turns, and how many attempts they took, so that none is made twice."""

import json
import time
from pathlib import Path

from peagle.data.records import Record, read_records
from peagle.data.self_prompts import Attempts
from peagle.data.shards import replacing
from peagle.data.whole_text import whole_text
from peagle.errors import InputError

UNCOUNTED = 1 << 40  # files of earlier versions do not say how many there were: further than any of them came


class SelfPromptFile:
    """JSON lines of `prompt` and `source`, as `--prompts` reads them; the last one also says `attempts`.

    Attributes:
        turns: the kept ones, those of earlier runs first.
        attempts: to be counted on by whoever writes turns; saved with them.
    """

    def __init__(self, path: Path, source: str, every: int = 1000, seconds: float = 60.0):
        """every, seconds: `add` saves after so many turns, and when so much time has passed since it last did.

        Raises InputError for a file that cannot be read.
        """
        self.path, self.source = path, source
        self.turns: list[str] = []
        self.attempts = Attempts()
        self._every, self._seconds = every, seconds
        if path.exists():
            for place, row in read_records(path):
                self.turns.append(whole_text(str(row["prompt"]), f"{place}: field 'prompt'"))
                self.attempts = Attempts(_attempts_of(row, place))
        self._saved, self._saved_at = len(self.turns), time.monotonic()

    def add(self, turn: str) -> None:
        self.turns.append(turn)
        if len(self.turns) - self._saved >= self._every or time.monotonic() - self._saved_at > self._seconds:
            self.save()

    def save(self) -> None:
        """Replace the file in one step. Without a turn there is none: a rerun then does the same once more."""
        if not self.turns:
            return
        rows: list[Record] = [{"prompt": turn, "source": self.source} for turn in self.turns]
        rows[-1]["attempts"] = self.attempts.made
        with replacing(self.path) as temporary:
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            temporary.write_text(text, encoding="utf-8")
        self._saved, self._saved_at = len(self.turns), time.monotonic()


def _attempts_of(row: Record, place: str) -> int:
    made = row.get("attempts", UNCOUNTED)
    if not isinstance(made, int) or isinstance(made, bool) or made < 0:
        raise InputError(f"{place}: attempts: got {made!r}, expected a whole number of 0 or more")
    return made
