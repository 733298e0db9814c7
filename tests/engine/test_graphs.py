"""When a function is run, recorded and replayed, with CUDA's part played by a stand-in."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from peagle.engine.graphs import Graphs


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
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    for _ in range(3):
        graphs.run("b", lambda: calls.append("b"))
    graphs.run("a", lambda: calls.append("a"))
    assert calls == ["a", "a", "b", "b", "b"]
    assert made[0].replays == 3
    assert not graphs.possible
    assert list(graphs.keys()) == ["a"]
    assert "out of memory" in caplog.text


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
