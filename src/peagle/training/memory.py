"""Sizes chosen from free memory: anchors in a chunk, rows in a slice of the loss."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from peagle.config.training import TrainConfig
from peagle.drafter.config import DrafterConfig
from peagle.errors import InputError
from peagle.training.attention import BLOCK, Backend
from peagle.training.chunks import round_up

FALLBACK_FREE = 4 << 30  # where the system does not say
CPU_BUDGET = 2 << 30  # more does not run faster on a CPU


def free_memory(device: torch.device) -> int:
    """Bytes that a run may take more, on the device."""
    if device.type == "cuda":
        # what this process has cached but does not use counts as free
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return FALLBACK_FREE


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held so far: of the device's memory, or of the host's for a CPU run."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return held if sys.platform == "darwin" else 1024 * held


def budget(device: torch.device) -> int:
    """A third of what is free: other processes may share the device."""
    free = free_memory(device)
    return free // 3 if device.type == "cuda" else min(free // 3, CPU_BUDGET)


def rows_per_anchor(depths: int, keep_rate: float) -> float:
    """Expected rows of an anchor whose tokens are all supervised."""
    return sum(keep_rate**d for d in range(depths))


def choose_chunk_size(
    config: DrafterConfig,
    pack_length: int,
    depths: int,
    keep_rate: float,
    backend: Backend,
    itemsize: int,
    room: int,
    checkpointed: bool = False,
) -> int:
    """Anchors of a chunk whose graph fits in `room` bytes: the whole pack when it can, else equal parts of it.

    checkpointed: layers are computed again in the backward, so that one layer's graph is held at a time.
    """
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    # what autograd keeps of a row in one layer: norms, residuals, projections, RoPE, MLP
    row = itemsize * (12 * config.hidden_size + 5 * config.intermediate_size + (5 * heads + 6 * kv_heads) * dim)
    if backend == "dense":
        row += 4 * heads * pack_length * max(itemsize, 4)  # scores, mask and weights against every depth-0 key
        row += 2 * depths * kv_heads * dim * itemsize  # gathered chain keys
    layers = config.num_hidden_layers
    if checkpointed:  # of the others their input, and the keys and values that later passes and chunks read
        row += layers * (config.hidden_size + 2 * kv_heads * dim) * itemsize
    else:
        row *= layers
    row += 8 * config.hidden_size * itemsize
    per_anchor = rows_per_anchor(depths, keep_rate) * row
    chunks = 1
    while chunks < pack_length and per_anchor * -(-pack_length // chunks) > room:
        chunks *= 2
    size = -(-pack_length // chunks)
    if chunks > 1 and backend != "dense":
        size = round_up(size, BLOCK)
    return min(size, pack_length)


def choose_loss_rows(vocab_size: int, draft_vocab_size: int, device: torch.device, itemsize: int, room: int) -> int:
    """Rows of a loss slice: a power of two, at most 8192 on a GPU and 512 elsewhere."""
    row = (vocab_size + 2 * draft_vocab_size) * itemsize + 4 * (vocab_size + draft_vocab_size)
    if device.type != "cuda":
        row += 16 * (vocab_size + draft_vocab_size)  # no compiled kernel: temporaries
    rows = 8192 if device.type == "cuda" else 512
    while rows > 16 and rows * row > room // 4:
        rows //= 2
    return rows


@dataclass(frozen=True)
class Sizes:
    """Anchors of a chunk and rows of a slice of the loss."""

    chunk_size: int
    loss_rows: int


def choose_sizes(
    config: TrainConfig,
    head: DrafterConfig,
    device: torch.device,
    dtype: torch.dtype,
    backend: Backend,
    before: dict[str, int],
) -> Sizes:
    """Sizes that `config` names, else those of `before` (a run that goes on), else what fits into free memory."""
    keep_rate = 1.0 if config.kind == "eagle3" else config.keep_rate
    room, itemsize = budget(device), dtype.itemsize
    chunk, rows = config.chunk_size, config.loss_rows
    if chunk == "auto":
        chunk = before.get("chunk_size") or choose_chunk_size(
            head,
            config.pack_length,
            config.depths,
            keep_rate,
            backend,
            itemsize,
            room,
            config.activation_checkpointing,
        )
    if rows == "auto":
        rows = before.get("loss_rows") or choose_loss_rows(
            head.vocab_size, head.draft_vocab_size, device, itemsize, room
        )
    return Sizes(min(chunk, config.pack_length), rows)


@contextmanager
def fits(what: str, remedy: str) -> Iterator[None]:
    """Turn running out of memory within into an InputError: what did not fit, and which flag to lower."""
    try:
        yield
    except RuntimeError as error:
        # on the host PyTorch has no error type of its own for it
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        reason = str(error).splitlines()[0]
        raise InputError(f"{what} does not fit into the device's memory: {remedy} ({reason})") from None
