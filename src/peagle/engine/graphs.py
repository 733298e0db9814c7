"""CUDA graphs by key: a function that runs on the device alone is recorded when first run, then replayed."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager

import torch

from peagle.engine.memory import is_out_of_memory

log = logging.getLogger(__name__)

# Batch sizes (requests) that are recorded; a batch is padded to the next one.
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)


def capture_sizes(max_num_seqs: int, limit: int) -> tuple[int, ...]:
    """The batch sizes to record so that batches of up to max_num_seqs requests, or of `limit` if that is less, fit."""
    most = min(max_num_seqs, limit)
    return tuple(size for size in SIZES if size < most) + ((most,) if most > 0 else ())


class Graphs:
    """Recorded graphs, which share their memory: run one at a time, on one stream."""

    def __init__(self) -> None:
        self._warm: set[Hashable] = set()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._too_large: set[Hashable] = set()  # no memory was left for these
        self._possible = True
        self._at_start = False

    def __len__(self) -> int:
        """How many are recorded."""
        return len(self._graphs)

    def keys(self) -> Collection[Hashable]:
        """What is recorded."""
        return self._graphs.keys()

    @property
    def possible(self) -> bool:
        """Whether this model's steps can be recorded, as far as is known."""
        return self._possible

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """Until its end a recording that finds no memory raises torch.OutOfMemoryError: there is still somebody who can
        lower a setting."""
        self._at_start = True
        try:
            yield
        finally:
            self._at_start = False

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run `function`, which must use the same tensors whenever it comes with the same key.

        Its first run is an ordinary one, in which kernels are compiled and libraries find their plans; before its
        second it is recorded. A model that cannot be recorded (some mixtures of experts wait for the device within a
        step) runs as it is, and so does a key for whose recording no memory is left while requests are served. Every
        call runs the function exactly once: a step is not to be repeated.
        """
        recordable = self._possible and key in self._warm and key not in self._too_large
        if key in self._graphs or (recordable and self._record(key, function)):
            self._graphs[key].replay()
            return
        if self._possible and key not in self._warm:
            self._warm.add(key)
            self._run_first(function)
            return
        function()

    def _run_first(self, function: Callable[[], None]) -> None:
        """Run it and see whether it waited for the device."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                function()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        for warning in caught:
            if "called a synchronizing" in str(warning.message):
                self._give_up(f"it waits for the device in {warning.filename}, line {warning.lineno}")
                return

    def _record(self, key: Hashable, function: Callable[[], None]) -> bool:
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        try:
            with torch.cuda.graph(graph, pool=pool):
                function()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                self._give_up(str(error))
                return False
            if self._at_start:
                raise torch.OutOfMemoryError(f"recording the CUDA graph {key}: {error}") from error
            self._too_large.add(key)
            log.warning("no memory is left to record the CUDA graph %s, so such steps run without (%s)", key, error)
            return False
        self._graphs[key] = graph
        return True

    def _give_up(self, reason: str) -> None:
        self._possible = False
        log.warning("this model's step cannot be recorded, so it runs without CUDA graphs (%s)", reason)
