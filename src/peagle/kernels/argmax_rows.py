"""The argmax of few long rows: PyTorch's own keeps one core a row busy where the whole card could read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096


@triton.jit
def _chunk_kernel(best_ptr, where_ptr, x_ptr, vocab, x_stride, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))  # with NaN the index could be one behind the row
    best, where = tl.max(x, 0, return_indices=True)
    cell = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + cell, best)
    tl.store(where_ptr + cell, chunk * CHUNK + where)


@triton.jit
def _join_kernel(out_ptr, best_ptr, where_ptr, chunks, CHUNKS: tl.constexpr):
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    tl.store(out_ptr + row, tl.load(where_ptr + row * chunks + tl.argmax(best, 0)).to(tl.int64))


def join_chunks(best: Tensor, where: Tensor) -> Tensor:
    """best [N, chunks], the greatest number of each chunk, and where [N, chunks] its index -> each row's index [N]."""
    rows, chunks = best.shape
    out = torch.empty(rows, dtype=torch.int64, device=best.device)
    if rows:
        _join_kernel[(rows,)](out, best, where, chunks, CHUNKS=triton.next_power_of_2(chunks), num_warps=1)
    return out


def argmax_rows_triton(x: Tensor) -> Tensor:
    """x [N, V], the last dimension contiguous -> the index [N] int64 of each row's greatest number, the first of
    several; NaN counts as the least."""
    rows, vocab = x.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty((rows, chunks), dtype=torch.float32, device=x.device)
    where = torch.empty((rows, chunks), dtype=torch.int32, device=x.device)
    if rows:
        _chunk_kernel[(rows, chunks)](best, where, x, vocab, x.stride(0), CHUNK=CHUNK)
    return join_chunks(best, where)
