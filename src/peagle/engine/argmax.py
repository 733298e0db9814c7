"""The argmax of rows of logits, on any device."""

from __future__ import annotations

import torch
from torch import Tensor

ARGMAX_CHUNK = 64


def argmax_rows(logits: Tensor) -> Tensor:
    """The argmax [N] of rows [N, V], the first of several.

    On a CPU PyTorch's own takes as long as much of a drafter layer, so there the best chunk is found first.
    """
    rows, vocab = logits.shape
    if logits.is_cuda and logits.stride(1) == 1:
        from peagle.kernels.argmax_rows import argmax_rows_triton

        return argmax_rows_triton(logits)
    if logits.is_cuda or vocab % ARGMAX_CHUNK or rows == 0:
        return logits.argmax(dim=-1)
    chunks = logits.view(rows, vocab // ARGMAX_CHUNK, ARGMAX_CHUNK)
    best = chunks.amax(dim=-1).argmax(dim=-1)
    return best * ARGMAX_CHUNK + chunks[torch.arange(rows), best].argmax(dim=-1)
