"""SIGTERM and SIGHUP as another Ctrl-C: what is in memory is written, and what was started stopped, before the end."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

NUMBERS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]  # not all on every system


class Terminated(KeyboardInterrupt):
    """One of the signals came; it goes the way of a Ctrl-C."""


@contextmanager
def ends_on_signals() -> Iterator[None]:
    """SIGTERM or SIGHUP interrupts the block, once; the command then ends with the status that shells give that signal,
    143 or 129. One that is ignored (as nohup has it) stays so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in NUMBERS if (handler := signal.getsignal(number)) is not signal.SIG_IGN}
    came: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # another one must not break off the writing
        came.append(number)
        _drop_dead_outputs()
        raise Terminated

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    except Terminated as error:
        typer.echo(f"peagle: ended by {signal.Signals(came[0]).name}; the same command goes on", err=True)
        raise typer.Exit(128 + came[0]) from error
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _drop_dead_outputs() -> None:
    """What is written to a terminal that has gone is an error, and would break off the end."""
    for stream in (sys.stdout, sys.stderr):
        try:
            descriptor = stream.fileno()
            poll = select.poll()
            poll.register(descriptor, 0)
            if poll.poll(0):  # nothing is waited for, so only that it hung up or failed is told
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, descriptor)
                os.close(null)
        except (AttributeError, OSError, ValueError):  # no stream, or none of a descriptor
            continue
