"""The measured points of long_beside.py: what one process measures at one length after another, told line by line."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from long_common import (
    EIGHT_B,
    GIB,
    TINY,
    Shape,
    compilations,
    measure,
    seconds_of,
    sort_outside_triton,
    until_it_fails,
    warm_up,
)
from torch import Tensor

STEPS = 3  # measured steps a point
WARM_UP_AT_MOST = 6


def tell(event: str, **what: Any) -> None:
    """One line of JSON on standard output, for the process that started this one."""
    print(json.dumps({"event": event} | what), flush=True)


def point(
    device: torch.device, length: int, rows: int, gradients: Callable[[], Tensor], update: Callable[[], None],
    forget: Callable[[], None],
) -> dict[str, Any]:  # fmt: skip
    """Forward and backward, timed alone and in whole optimizer steps, after steps until nothing compiles any more."""
    loss = 0.0

    def whole() -> None:
        nonlocal loss
        loss = float(gradients())
        update()

    def alone() -> None:
        gradients()
        forget()

    before = compilations()
    warm = warm_up(device, whole, WARM_UP_AT_MOST, tell)
    settled = compilations()
    # the optimizer's moments exist by now, and are in both peaks
    row = measure(device, length, alone, STEPS)
    row["optimizer_step"] = measure(device, length, whole, STEPS)
    graphs = "stats.unique_graphs"
    return row | {
        "rows": rows,
        "loss": loss,
        "warm_up_seconds": warm,
        "graphs_compiled": settled.get(graphs, 0) - before.get(graphs, 0),
        "compiled_while_measured": compilations() != settled,
    }


def peer_points(shape: Shape, device: torch.device, lengths: list[int], _sizes: list[int]) -> None:
    from long_speculators import DEVIATIONS, Peer

    peer = Peer(shape, device)
    count = sum(p.numel() for p in peer.parameters)
    tell("ready", trained_parameters=count, version=peer.version, deviations=DEVIATIONS)
    torch._dynamo.config.automatic_dynamic_shapes = False
    for length in lengths:
        tell("begin", length=length)
        torch._dynamo.reset()

        def run(length: int = length) -> dict[str, Any]:
            rows, batch = peer.batch(length)
            return point(device, length, rows, lambda: peer.gradients(batch), peer.update, peer.forget)

        tell("row", row=until_it_fails(device, length, run))
        clear(device, peer.forget)


def our_points(shape: Shape, device: torch.device, lengths: list[int], sizes: list[int]) -> None:
    from long_head import Training, make_chunks, sampled_rows

    from peagle.training.partition import train_pack

    training = Training(shape, device)
    tell("ready", trained_parameters=sum(p.numel() for p in training.parameters))
    for length, size in [(length, size) for length in lengths for size in sizes if size == sizes[0] or size < length]:
        tell("begin", length=length, chunk_size=size)

        def run(length: int = length, size: int = size) -> dict[str, Any]:
            table = sampled_rows(shape, length, shape.keep_rate)
            chunks = make_chunks(training, table, size)
            aux, hidden = training.states(length)
            loss = training.chunk_loss(hidden)

            def gradients() -> Tensor:
                return train_pack(training.copy.compute, chunks, aux, loss, training.backend).loss

            row = point(device, length, len(table.anchor), gradients, training.update, training.forget)
            return row | {"rows_with_fillers": sum(chunk.num_rows for chunk in chunks)}

        tell("row", row=until_it_fails(device, length, run) | {"chunk_size": size})
        clear(device, training.forget)


def flat_points(shape: Shape, device: torch.device, lengths: list[int], _sizes: list[int]) -> None:
    """One forward and backward a length, compilation in its time, with the optimizer's moments in memory."""
    from long_head import Training, make_chunks, sampled_rows
    from long_plain import by_depth, flat_loss

    sort_outside_triton()
    training = Training(shape, device)
    for parameter in training.parameters:
        parameter.grad = torch.zeros_like(parameter)
    training.update()
    tell("ready", trained_parameters=sum(p.numel() for p in training.parameters))
    too_long = 1 << 40
    for length in lengths:
        if length >= too_long:
            continue
        tell("begin", length=length)

        def run(length: int = length) -> dict[str, Any]:
            chunk = by_depth(make_chunks(training, sampled_rows(shape, length, 1.0), length)[0])
            aux, hidden = training.states(length)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            seconds = seconds_of(device, lambda: flat_loss(training, chunk, aux, hidden).backward())
            row: dict[str, Any] = {"length": length, "rows": chunk.num_rows, "seconds_with_compilation": seconds}
            return row | ({"peak_gib": torch.cuda.max_memory_allocated(device) / GIB} if device.type == "cuda" else {})

        row = until_it_fails(device, length, run)
        if "failed" in row:
            too_long = min(too_long, length)
        tell("row", row=row)
        clear(device, training.forget)


def clear(device: torch.device, forget: Callable[[], None]) -> None:
    forget()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


SIDES = {"speculators": peer_points, "peagle": our_points, "flat": flat_points}


def work(side: str) -> None:
    """Import what takes long, wait for the word, measure. The word is a line of JSON on standard input."""
    if side == "speculators":
        import long_speculators

        long_speculators.load_speculators()
    else:
        import long_plain  # noqa: F401
    tell("imported")
    line = sys.stdin.readline()
    if not line:
        return
    word = json.loads(line)
    SIDES[side](TINY if word["tiny"] else EIGHT_B, torch.device(word["device"]), word["lengths"], word["chunk_sizes"])
