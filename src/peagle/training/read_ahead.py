"""Stored states that one thread reads from files before another one's step needs them."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Container, Sequence

from peagle.engine.memory import host_memory
from peagle.training.state_cache import Placed
from peagle.training.states import StoredDocument

FALLBACK_HOST = 16 << 30  # where the system does not say
MOST = 16 << 30  # four packs of 131,072 tokens of a target with hidden size 4,096


def ahead_bytes() -> int:
    """Bytes that a process reads ahead: at most 16 GiB, and a machine's processes together a quarter of its free
    memory."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return min(MOST, (host_memory() or FALLBACK_HOST) // 4 // processes)


class ReadAhead:
    """Documents' states on the host, in the order of their use, whatever steps they belong to: a document more than
    `room` bytes at most, so that one is there in any case.

    read: gives the states of a document's first tokens. kept: documents that need not be read. pinned: in memory that
    the device copies from by itself.
    """

    def __init__(
        self, read: Callable[[int, int], StoredDocument], kept: Container[int], room: int, pinned: bool
    ) -> None:
        self.read, self.kept, self.room, self.pinned = read, kept, room, pinned
        self.held = 0  # bytes
        self._ready: deque[tuple[int, StoredDocument | BaseException]] = deque()
        self._changed = threading.Condition()

    def fill(self, placed: Sequence[Placed], stop: threading.Event) -> None:
        """Read the documents of a step whose batch is handed over already, whenever there is room, until `stop`."""
        for item in placed:
            if item.document in self.kept:
                continue
            with self._changed:
                while self._ready and self.held >= self.room and not stop.is_set():
                    self._changed.wait(0.2)
            if stop.is_set():
                return
            try:
                states = self.read(item.document, item.length)
                self._add(item.document, states.pin() if self.pinned else states)
            except BaseException as error:
                self._add(item.document, error)
                raise

    def take(self, document: int) -> StoredDocument:
        """The states of the next document that is used; those of documents before it, which were not, are dropped.
        Raises what reading it raised."""
        with self._changed:
            while True:
                while not self._ready:
                    self._changed.wait()
                number, states = self._ready.popleft()
                if isinstance(states, BaseException):
                    raise states
                self.held -= states.num_bytes
                self._changed.notify_all()
                if number == document:
                    return states

    def _add(self, document: int, states: StoredDocument | BaseException) -> None:
        with self._changed:
            self._ready.append((document, states))
            if isinstance(states, StoredDocument):
                self.held += states.num_bytes
            self._changed.notify_all()
