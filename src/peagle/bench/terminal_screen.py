"""Where a sweep shows itself: lines on stderr, and a bar of the running arm's requests where that is a terminal."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from peagle.bench.records import Record


class TerminalScreen:
    """`peagle.bench.sweep.Screen` for a terminal or a log file."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._failed = 0

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def begin(self, label: str, num_requests: int) -> None:
        self._failed = 0
        # disable=None: silent where stderr is no terminal
        self._bar = tqdm(total=num_requests, desc=label, unit="answer", disable=None, dynamic_ncols=True, leave=False)

    def request(self, record: Record) -> None:
        if record.failure is not None:
            self._failed += 1
            self._bar.set_postfix_str(f"{self._failed} failed", refresh=False)
        self._bar.update(1)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
