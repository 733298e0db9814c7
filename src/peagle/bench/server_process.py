"""A server that the benchmark starts and stops: its own process group, a free port, a log that is kept."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import httpx

from peagle.errors import InputError

TAIL_LINES = 25
STOP_SECONDS = 30.0
# Becomes the command, after asking the kernel for a SIGTERM when its parent (the first argument) is gone. Not a
# `preexec_fn`, which is not safe in a process with threads.
ENDS_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM))
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[3:])
"""


class ServerStartError(InputError):
    """A server did not come up; the message ends with the last lines of its log."""


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def log_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a log, for an error message."""
    try:
        content = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "(no log)"
    return "\n".join(f"  | {line}" for line in content[-lines:]) or "  | (the log is empty)"


@contextlib.contextmanager
def running_server(
    command: Sequence[str], url: str, log: Path, env: Mapping[str, str], start_timeout: float
) -> Iterator[None]:
    """Start `command`, wait until url/health answers 200, and stop the whole process group at the end.

    Output goes to `log`, behind what earlier starts left there. On Linux the server is asked to end too when this
    process is killed. Raises ServerStartError when the process ends or is not ready after start_timeout seconds.
    """
    program = shutil.which(command[0], path=env.get("PATH"))
    if program is None:
        raise ServerStartError(f"{command[0]} cannot be started (no such program)")
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        try:
            process = subprocess.Popen(
                _ending_with_this_process(program, command),
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=dict(env),
                start_new_session=True,
            )
        except OSError as error:
            raise ServerStartError(f"{command[0]} cannot be started ({error.strerror or error})")
        try:
            _wait_until_healthy(process, url, log, start_timeout)
            yield
        finally:
            stop(process)


def _ending_with_this_process(program: str, command: Sequence[str]) -> list[str]:
    # the signal comes when the thread that has started a process ends, so other threads do without
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return [program, *command[1:]]
    return [sys.executable, "-I", "-S", "-c", ENDS_WITH_PARENT, str(os.getpid()), program, *command]


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str, log: Path, start_timeout: float) -> None:
    until = time.monotonic() + start_timeout
    while True:
        code = process.poll()
        if code is not None:
            raise ServerStartError(f"the server ended with status {code} before it was ready ({log}):\n{log_tail(log)}")
        try:
            if httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        if time.monotonic() > until:
            raise ServerStartError(f"the server was not ready after {start_timeout:g} s ({log}):\n{log_tail(log)}")
        time.sleep(0.25)


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it started: asked first, then forced; an interrupt meanwhile forces at once."""
    try:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:
        # workers of a server that ended badly may live on in its group
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
