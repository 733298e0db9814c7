"""Triton kernels for the paged KV cache. Their specification is `peagle.target.paged_attention`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.attention_table import choose_config
from peagle.kernels.decode_attention import decode_attention_triton
from peagle.kernels.early_launch import early_launch
from peagle.kernels.join_splits import join_splits
from peagle.target.paged_attention import FP8, PagedBatch

# Splitting keys pays when few rows a request (decoding, verification) leave most of the card idle.
MOST_SPLIT_ROWS, MOST_SPLITS, KEYS_A_SPLIT = 32, 16, 64
SEARCH_STEPS = 6  # at least, so that batches of up to 63 requests share a compiled kernel


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, k_stride, v_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_FP8: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        k = tl.load(k_ptr + row * k_stride + column, mask=inside)
        v = tl.load(v_ptr + row * v_stride + column, mask=inside)
        if IS_FP8:
            k = tl.minimum(tl.maximum(k.to(tl.float32), -448.0), 448.0)
            v = tl.minimum(tl.maximum(v.to(tl.float32), -448.0), 448.0)
        tl.store(k_cache_ptr + slot * WIDTH + column, k.to(k_cache_ptr.dtype.element_ty), mask=inside)
        tl.store(v_cache_ptr + slot * WIDTH + column, v.to(v_cache_ptr.dtype.element_ty), mask=inside)


def write_kv_triton(k: Tensor, v: Tensor, flat_k: Tensor, flat_v: Tensor, slot_mapping: Tensor) -> None:
    """k and v [T, Hkv, D] into flat caches [slots, Hkv, D]; slot -1 writes nothing."""
    if not len(k):
        return
    k, v = (x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous() for x in (k, v))
    width = k.shape[1] * k.shape[2]
    _write_kv_kernel[(len(k),)](
        k, v, flat_k, flat_v, slot_mapping, k.stride(0), v.stride(0),
        WIDTH=width, BLOCK=triton.next_power_of_2(width), IS_FP8=flat_k.dtype is FP8,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "num_requests", "table_stride"])
def _paged_attention_kernel(
    out_ptr, part_ptr, best_ptr, total_ptr,
    q_ptr, k_ptr, v_ptr, sinks_ptr, position_ptr, query_start_ptr, block_table_ptr,
    num_rows, num_requests, table_stride, q_stride_row, q_stride_head, scale, window, softcap,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SEARCH_STEPS: tl.constexpr,
    NUM_SPLITS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Query tiles are numbered so that request r's first tile is query_start[r] // BLOCK_Q + r: an upper bound of the
    # tiles is then known without reading lengths back, and a binary search finds the request of a tile.
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    low = 0
    high = num_requests
    for _ in range(SEARCH_STEPS):
        middle = (low + high) // 2
        begin = tl.load(query_start_ptr + middle, mask=middle < num_requests, other=0)
        if (middle < num_requests) & (begin // BLOCK_Q + middle <= tile):
            low = middle + 1
        else:
            high = middle
    request = low - 1
    start = tl.load(query_start_ptr + request)
    end = tl.load(query_start_ptr + request + 1)
    first_row = start + (tile - (start // BLOCK_Q + request)) * BLOCK_Q
    if first_row >= end:
        return

    m = tl.arange(0, BLOCK_Q * GROUP_PAD)
    row = first_row + m // GROUP_PAD
    member = m % GROUP_PAD
    head = kv_head * GROUP + member
    live = (row < end) & (member < GROUP)
    d = tl.arange(0, DIM)
    in_dim = d < HEAD_DIM
    q = tl.load(
        q_ptr + row[:, None] * q_stride_row + head[:, None] * q_stride_head + d[None],
        mask=live[:, None] & in_dim[None], other=0.0,
    )  # fmt: skip
    position = tl.load(position_ptr + row, mask=live, other=-1).to(tl.int32)
    last = tl.max(position, 0)
    first = 0
    if HAS_WINDOW:
        oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        first = tl.maximum(oldest, 0) // BLOCK_N * BLOCK_N

    stop = last + 1
    split = tl.program_id(2)
    if NUM_SPLITS > 1:
        length = ((stop - first + BLOCK_N - 1) // BLOCK_N + NUM_SPLITS - 1) // NUM_SPLITS * BLOCK_N
        first = first + split * length
        stop = tl.minimum(stop, first + length)

    best = tl.full([BLOCK_Q * GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q * GROUP_PAD], tl.float32)
    if HAS_SINKS:  # in the first split only
        begins = (member * 0 + split) == 0
        best = tl.load(sinks_ptr + head, mask=live & begins, other=float("-inf")).to(tl.float32)
        total = tl.where(begins, 1.0, 0.0)
    acc = tl.zeros([BLOCK_Q * GROUP_PAD, DIM], tl.float32)
    for n0 in range(first, stop, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        block = tl.load(block_table_ptr + request * table_stride + n // BLOCK_SIZE, mask=n <= last, other=0)
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        offset = (slot[:, None] * NUM_KV_HEADS + kv_head) * HEAD_DIM + d[None]
        loaded = (n <= last)[:, None] & in_dim[None]
        k = tl.load(k_ptr + offset, mask=loaded, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        seen = n[None] <= position[:, None]
        if HAS_WINDOW:
            seen = seen & (n[None] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp(scores - safe[:, None])
        shrink = tl.exp(best - safe)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(v_ptr + offset, mask=loaded, other=0.0).to(q.dtype)
        acc = acc * shrink[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = new_best
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    where = row * num_heads + head
    if NUM_SPLITS == 1:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(
            out_ptr + where[:, None] * HEAD_DIM + d[None],
            acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & in_dim[None],
        )  # fmt: skip
    else:
        where = split.to(tl.int64) * num_rows * num_heads + where
        tl.store(part_ptr + where[:, None] * HEAD_DIM + d[None], acc, mask=live[:, None] & in_dim[None])
        tl.store(best_ptr + where, best, mask=live)
        tl.store(total_ptr + where, total, mask=live)


def choose_splits(requests: int, max_query_len: int, block_q: int, kv_heads: int, max_context: int, cores: int) -> int:
    """Into how many parts (a power of 2) the keys of a request are split, so that few requests use the whole card."""
    if max_query_len > MOST_SPLIT_ROWS:
        return 1
    programs = requests * triton.cdiv(max_query_len, block_q) * kv_heads
    splits = 1
    while splits < MOST_SPLITS and programs * splits < cores and splits * KEYS_A_SPLIT < max_context:
        splits *= 2
    return splits


def paged_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    is_chained: bool = False,
) -> Tensor:
    """As `peagle.target.paged_attention.paged_attention`, without reading anything back; in one launch, or in two when
    the keys are split (num_splits, None: by `choose_splits`). Batches that `attention_table` lists run the kernel of
    `decode_attention` instead, unless num_splits is given. is_chained: launched early (`early_launch`)."""
    rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    requests = len(batch.query_start) - 1
    group = num_heads // num_kv_heads
    if num_splits is None:
        config = choose_config(requests, batch.max_query_len, num_kv_heads, group, head_dim, k_cache.element_size())
        if config is not None:
            return decode_attention_triton(
                q, k_cache, v_cache, batch, scale, config, sliding_window, sinks, softcap, is_chained
            )
    if q.stride(2) != 1:
        q = q.contiguous()
    out = torch.empty((rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    group_pad = triton.next_power_of_2(group)
    # 16 is the smallest tile of the matrix units; long prefills amortise a larger one
    tile_rows = 16 if batch.max_query_len * group_pad <= 16 else 32 if batch.max_query_len * group_pad <= 32 else 64
    block_q = max(1, tile_rows // group_pad)
    if num_splits is None:
        cores = torch.cuda.get_device_properties(q.device).multi_processor_count if q.is_cuda else 1
        num_splits = choose_splits(
            requests, batch.max_query_len, block_q, num_kv_heads, batch.max_context_len, 2 * cores
        )
    dim = max(16, triton.next_power_of_2(head_dim))
    part = best = total = out
    if num_splits > 1:
        part = torch.empty((num_splits, rows, num_heads, head_dim), dtype=torch.float32, device=q.device)
        best, total = torch.empty((2, num_splits, rows, num_heads), dtype=torch.float32, device=q.device)
    grid = (rows // block_q + requests, num_kv_heads, num_splits)
    _paged_attention_kernel[grid](
        out, part, best, total,
        q, k_cache, v_cache, sinks if sinks is not None else q, batch.positions, batch.query_start, batch.block_tables,
        rows, requests, batch.block_tables.stride(0), q.stride(0), q.stride(1), scale,
        sliding_window or 0, softcap or 0.0,
        BLOCK_SIZE=block_size, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
        DIM=dim, BLOCK_Q=block_q, GROUP_PAD=group_pad, BLOCK_N=64,
        HAS_SINKS=sinks is not None, HAS_WINDOW=sliding_window is not None, HAS_SOFTCAP=bool(softcap),
        SEARCH_STEPS=max(SEARCH_STEPS, requests.bit_length()), NUM_SPLITS=num_splits, IS_CHAINED=is_chained,
        **early_launch(is_chained),
    )  # fmt: skip
    if num_splits > 1:
        join_splits(out, part, best, total, is_chained)
    return out
