"""`engine.race.race_rows` in one pass over the logits: the noise of a token is made where its logit is read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.argmax_rows import CHUNK, join_chunks


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _race_kernel(best_ptr, where_ptr, x_ptr, temperature_ptr, key_ptr, vocab, x_stride, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))  # as in the argmax
    temperature = tl.load(temperature_ptr + row)
    key = tl.load(key_ptr + row).to(tl.uint32, bitcast=True)
    bits = _mix32(_mix32(column.to(tl.uint32)) ^ key)
    share = ((bits >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2^-31
    # -log1p(-share), whose digits count where it is small
    wait = tl.where(share < 0.01, share * (1 + share * (0.5 + share * 0.3333333)), -tl.log(1 - share))
    best, where = tl.max(x / temperature - tl.log(wait), 0, return_indices=True)
    cell = row * tl.num_programs(1) + chunk
    tl.store(best_ptr + cell, best)
    tl.store(where_ptr + cell, chunk * CHUNK + where)


def race_rows_triton(logits: Tensor, temperature: Tensor, keys: Tensor) -> Tensor:
    """logits [N, V], the last dimension contiguous, temperature float32 [N], keys int32 [N] -> token ids int64 [N]."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty((rows, chunks), dtype=torch.float32, device=logits.device)
    where = torch.empty((rows, chunks), dtype=torch.int32, device=logits.device)
    if rows:
        _race_kernel[(rows, chunks)](
            best, where, logits, temperature.contiguous(), keys.contiguous(), vocab, logits.stride(0), CHUNK=CHUNK
        )
    return join_chunks(best, where)
