"""SIGTERM and SIGHUP end a command as Ctrl-C does, with a status of their own, also where the terminal has gone."""

from __future__ import annotations

import os
import pty
import signal
import sys
from contextlib import contextmanager

import pytest
import typer

from peagle.cli.ending_signals import ends_on_signals

IN_A_TERMINAL = """
import sys, time
import typer
from peagle.cli.ending_signals import ends_on_signals

def command() -> None:
    with ends_on_signals():
        try:
            print("runs", flush=True)
            time.sleep(600)
        finally:
            print("a bar that ends", file=sys.stderr, flush=True)
            open(sys.argv[1], "w").write("written")

app = typer.Typer(add_completion=False)
app.command(context_settings={"allow_extra_args": True})(command)
app()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_block_is_left_and_the_status_is_the_signals(number, capsys):
    before, ends = signal.getsignal(number), []

    @contextmanager
    def at_work():
        try:
            yield
        finally:
            signal.raise_signal(number)  # a second one does not break off the end
            ends.append(True)

    with pytest.raises(typer.Exit) as ended, ends_on_signals(), at_work():
        signal.raise_signal(number)
    assert (ended.value.exit_code, ends) == (128 + number, [True])
    assert signal.getsignal(number) is before
    assert f"ended by {number.name}; the same command goes on" in capsys.readouterr().err


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ends_on_signals():
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_terminal_that_goes(tmp_path):
    """Writing to it is an error by then, and what follows must be done all the same."""
    written = tmp_path / "end"
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", IN_A_TERMINAL.replace("sys.argv[1]", repr(str(written)))])
    while b"runs" not in os.read(terminal, 1000):
        pass
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGHUP
    assert written.read_text() == "written"
