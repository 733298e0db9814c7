"""Stored states that are read before their turn: in order, within their room, errors handed over."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from peagle.errors import InputError
from peagle.training import read_ahead
from peagle.training.read_ahead import ReadAhead, ahead_bytes
from peagle.training.state_cache import Placed
from peagle.training.states import StoredDocument

PLACED = [Placed(document, 8 * document, 8) for document in range(6)]
SIZE = 8 * (6 + 2) * 4


class Files:
    """Stands in a folder's place: states that hold the document's number."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def document(self, document: int, length: int) -> StoredDocument:
        if document == 5:
            raise InputError("torn")
        self.read.append(document)
        return StoredDocument(torch.full((length, 6), float(document)), torch.zeros(length, 2), None)


def filling(ahead: ReadAhead, placed: list[Placed], stop: threading.Event) -> threading.Thread:
    thread = threading.Thread(target=ahead.fill, args=(placed, stop), daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("room", [1, 2 * SIZE, 1 << 30])
def test_no_more_than_a_document_beyond_the_room(room: int) -> None:
    files, most = Files(), 0
    ahead = ReadAhead(files.document, (), room, False)
    thread = filling(ahead, PLACED[:5], threading.Event())
    for document in range(5):
        assert (ahead.take(document).aux == document).all()
        most = max(most, ahead.held)
    thread.join()
    assert files.read == [0, 1, 2, 3, 4]
    assert ahead.held == 0
    assert most < room + SIZE


def test_reading_waits_for_room() -> None:
    files = Files()
    ahead = ReadAhead(files.document, (), 2 * SIZE, False)
    stop = threading.Event()
    thread = filling(ahead, PLACED[:5], stop)
    ahead.take(0)
    while ahead.held < 2 * SIZE:
        time.sleep(0.01)
    stop.set()
    thread.join()
    assert files.read == [0, 1, 2]


def test_kept_documents_are_not_read_and_those_kept_meanwhile_are_dropped() -> None:
    files, kept = Files(), {1}
    ahead = ReadAhead(files.document, kept, 1, False)
    thread = filling(ahead, PLACED[:5], threading.Event())
    assert (ahead.take(0).aux == 0).all()
    assert (ahead.take(4).aux == 4).all(), "2 and 3 stand before it and were not asked for"
    thread.join()
    assert files.read == [0, 2, 3, 4]
    assert ahead.held == 0


def test_what_cannot_be_read_is_said_where_it_is_needed() -> None:
    ahead = ReadAhead(Files().document, (), 1 << 30, False)
    with pytest.raises(InputError, match="torn"):
        ahead.fill(PLACED, threading.Event())
    for document in range(5):
        ahead.take(document)
    with pytest.raises(InputError, match="torn"):
        ahead.take(5)


def test_processes_of_a_machine_share_a_quarter_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "host_memory", lambda: 64 << 20)
    assert ahead_bytes() == 16 << 20
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ahead_bytes() == 2 << 20
    monkeypatch.setattr(read_ahead, "host_memory", lambda: 4 << 40)
    assert ahead_bytes() == 16 << 30
