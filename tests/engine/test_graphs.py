"""When a function is run, recorded and replayed, with CUDA's part played by a stand-in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from peagle.engine.graphs import Graphs
from peagle.engine.memory import is_out_of_memory


class FakeGraph:
    """Counts replays."""

    made: list[FakeGraph]

    def __init__(self) -> None:
        self.replays = 0
        self.made.append(self)

    def pool(self) -> tuple[int, int]:
        return (0, len(self.made))

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    FakeGraph.made = []
    pools: list[object] = []

    @contextmanager
    def graph(_graph: FakeGraph, pool: object) -> Iterator[None]:
        pools.append(pool)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _mode: None)
    return FakeGraph.made


def test_run_record_replay(made: list[FakeGraph]) -> None:
    graphs, calls = Graphs(), []
    for _ in range(4):
        graphs.run("a", lambda: calls.append("a"))
    assert calls == ["a", "a"]  # an ordinary run, and the recording
    assert [graph.replays for graph in made] == [3]
    graphs.run("b", lambda: calls.append("b"))
    assert calls[-1] == "b"
    assert len(graphs) == 1


def test_what_is_recorded_stays_when_another_cannot_be(
    made: list[FakeGraph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, calls = Graphs(), []
    for _ in range(3):
        graphs.run("a", lambda: calls.append("a"))

    def fails(_graph: FakeGraph, pool: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    for _ in range(3):
        graphs.run("b", lambda: calls.append("b"))
    graphs.run("a", lambda: calls.append("a"))
    assert calls == ["a", "a", "b", "b", "b"]
    assert made[0].replays == 3
    assert not graphs.possible
    assert list(graphs.keys()) == ["a"]
    assert "not permitted" in caplog.text


NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@contextmanager
def runs_out(_graph: FakeGraph, pool: object) -> Iterator[None]:
    """As torch.cuda.graph: what its function raises, it ends by an error of its own."""
    try:
        yield
    finally:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def test_no_memory_to_record_at_start_is_an_error(made: list[FakeGraph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", runs_out)
    graphs, calls = Graphs(), []

    def step() -> None:
        calls.append("a")
        if len(calls) == 2:
            raise NO_MEMORY

    with graphs.at_start():
        graphs.run("a", step)
        with pytest.raises(torch.OutOfMemoryError, match="recording the CUDA graph a"):
            graphs.run("a", step)


def test_no_memory_to_record_while_serving_leaves_the_other_graphs(
    made: list[FakeGraph], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    graphs, calls = Graphs(), []
    with monkeypatch.context() as full:
        full.setattr(torch.cuda, "graph", runs_out)

        def step() -> None:
            calls.append("large")
            if len(calls) == 2:
                raise NO_MEMORY

        for _ in range(4):
            graphs.run("large", step)
    assert calls == ["large"] * 5  # the recording, which was broken off, and each of the four runs
    assert graphs.possible
    assert caplog.text.count("no memory is left to record the CUDA graph large") == 1  # it is tried once
    for _ in range(3):
        graphs.run("small", lambda: calls.append("small"))
    assert list(graphs.keys()) == ["small"]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (NO_MEMORY, True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
            True,
        ),
        (RuntimeError("operation not permitted when stream is capturing"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_for_want_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_a_step_that_waits_runs_without(made: list[FakeGraph], caplog: pytest.LogCaptureFixture) -> None:
    graphs, calls = Graphs(), []

    def step() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)

    for _ in range(3):
        graphs.run("a", step)
    assert calls == [0, 1, 2]  # each once: a step changes what the next one reads
    assert not made
    assert "without CUDA graphs" in caplog.text
    assert f"{Path(__file__).name}, line" in caplog.text


def test_other_errors_are_not_hidden(made: list[FakeGraph]) -> None:
    def step() -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Graphs().run("a", step)


def test_a_failed_recording_is_no_failed_step(made: list[FakeGraph], caplog: pytest.LogCaptureFixture) -> None:
    graphs, calls = Graphs(), []

    def step() -> None:
        calls.append(len(calls))
        if len(calls) == 2:
            raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(3):
        graphs.run("a", step)
    assert calls == [0, 1, 2, 3]
    assert len(graphs) == 0
    assert "cannot be recorded" in caplog.text
