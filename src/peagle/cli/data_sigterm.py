"""SIGTERM as another Ctrl-C: what is in memory is written before the command ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class Terminated(KeyboardInterrupt):
    """SIGTERM came; it goes the way of a Ctrl-C."""


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM interrupts the block, once; the command then ends with the status that shells give that signal, 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_IGN)  # another one must not break off the writing
        raise Terminated

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except Terminated as error:
        typer.echo("peagle: ended by SIGTERM; the same command goes on", err=True)
        raise typer.Exit(128 + signal.SIGTERM) from error
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
