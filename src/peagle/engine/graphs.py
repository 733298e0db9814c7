"""CUDA graphs by key: a function that runs on the device alone is recorded when first run, then replayed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

import torch

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
        self._possible = True

    def __len__(self) -> int:
        """How many are recorded."""
        return len(self._graphs)

    def run(self, key: Hashable, function: Callable[[], None]) -> None:
        """Run `function`, which must use the same tensors whenever it comes with the same key.

        Its first run is an ordinary one, in which kernels are compiled and libraries find their plans; before its
        second it is recorded. A model that waits for the device within a step (some mixtures of experts) cannot be
        recorded and runs as it is; what was done of a run that failed is done again, which changes nothing.
        """
        if not self._possible:
            function()
        elif key not in self._warm:
            self._warm.add(key)
            torch.cuda.set_sync_debug_mode("error")
            try:
                function()
            except RuntimeError as error:
                self._give_up(error)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            if not self._possible:
                function()
        else:
            if key not in self._graphs:
                graph = torch.cuda.CUDAGraph()
                pool = next(iter(self._graphs.values())).pool() if self._graphs else None
                with torch.cuda.graph(graph, pool=pool):
                    function()
                self._graphs[key] = graph
            self._graphs[key].replay()

    def _give_up(self, error: RuntimeError) -> None:
        if "synchroniz" not in str(error):
            raise error
        self._possible = False
        log.warning("this model's step waits for the device, so it runs without CUDA graphs (%s)", error)
