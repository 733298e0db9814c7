"""Step batches made ahead of time, on a thread of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from dataclasses import replace

from peagle.training.batches import BatchMaker, StepBatch
from peagle.training.read_ahead import ReadAhead
from peagle.training.schedule import Schedule


def prefetch(
    maker: BatchMaker,
    schedule: Schedule,
    first: int,
    last: int | None,
    pinned: bool,
    read_ahead: ReadAhead | None = None,
) -> Generator[StepBatch, None, None]:
    """Batches of the steps first, first + 1, .. (below `last`), made on a background thread, two ahead.

    read_ahead: reads the batches' stored states on that thread, too.
    """
    ready: queue.Queue[StepBatch | BaseException | None] = queue.Queue(maxsize=2)
    stop = threading.Event()

    def put(item: StepBatch | BaseException | None) -> bool:
        while not stop.is_set():
            try:
                ready.put(item, timeout=0.2)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            epoch, at = schedule.locate(first)
            step = first
            while last is None or step < last:
                steps = schedule.epoch(epoch)
                if at == len(steps):
                    epoch, at = epoch + 1, 0
                    continue
                batch = replace(maker.make(step, steps[at], stream=1), ahead=read_ahead)
                if not put(batch.pin() if pinned else batch):
                    return
                if read_ahead is not None:  # after its batch: a step may need more than there is room for
                    read_ahead.fill(batch.placed, stop)
                step, at = step + 1, at + 1
            put(None)
        except BaseException as error:  # handed to the training thread
            put(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        stop.set()
        thread.join()
