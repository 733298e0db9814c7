"""How long a recorded CUDA graph takes to run."""

from __future__ import annotations

import torch


def replay_times(graph: torch.cuda.CUDAGraph, warm_replays: int, rounds: int, replays: int) -> list[float]:
    """Microseconds of a replay, of each of `rounds` rounds of `replays`."""
    for _ in range(warm_replays):
        graph.replay()
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / replays)
    return times
