"""SIGTERM and Ctrl-C ask a run to end, and to give up the step that it is in."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first SIGINT set; a second SIGINT interrupts as usual."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, _frame: object) -> None:
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])

    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            with suppress(ValueError, TypeError):
                signal.signal(number, handler)
