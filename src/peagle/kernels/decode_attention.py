"""Attention of few rows a request (decoding, verification, a draft batch) over the paged cache, one tile a request.

All query rows of a request and of the heads that share a kv head stand in one tile, so a request's keys and values are
read once and a program knows its request without a search. The specification is `peagle.target.paged_attention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.attention_table import DecodeConfig, tile_rows, useful_splits
from peagle.kernels.early_launch import early_launch
from peagle.kernels.join_splits import join_splits
from peagle.target.paged_attention import PagedBatch


@triton.jit(do_not_specialize=["num_rows", "query_len", "table_stride", "table_width"])
def _decode_attention_kernel(
    out_ptr, part_ptr, best_ptr, total_ptr,
    q_ptr, k_ptr, v_ptr, sinks_ptr, position_ptr, query_start_ptr, context_ptr, block_table_ptr,
    num_rows, query_len, table_stride, table_width, q_stride_row, q_stride_head, scale, window, softcap,
    BLOCK_SIZE: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, KEYS_FIRST: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_SPLIT: tl.constexpr,
    IS_UNIFORM: tl.constexpr, EARLY_JOIN: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    log2_e: tl.constexpr = 1.4426950408889634
    to_log2 = log2_e if HAS_SOFTCAP else scale * log2_e  # of a score, whose exponentials are powers of 2
    KEYS: tl.constexpr = 0 if KEYS_FIRST else 1  # the axis of the keys in a tile of scores
    if EARLY_JOIN:  # the next kernel may be started, to wait for this one's results on the card
        tl.extra.cuda.gdc_launch_dependents()
    if IS_CHAINED:
        tl.extra.cuda.gdc_wait()
    # heads run fastest: the programs that run together read neighbouring parts of the same positions
    kv_head = tl.program_id(0)
    request = tl.program_id(1)
    split = tl.program_id(2)
    step = tl.num_programs(2) * BLOCK_N
    # Splits take turns at the tiles, so the first blocks are looked up before any length is known.
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    first = split * BLOCK_N
    page = (first + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
    block = tl.load(table_ptr + page, mask=page < table_width, other=0)
    context = tl.load(context_ptr + request)
    if IS_UNIFORM:
        start = request * query_len
        end = start + query_len
    else:
        start = tl.load(query_start_ptr + request)
        end = tl.load(query_start_ptr + request + 1)
        if start == end:
            return

    m = tl.arange(0, ROWS)
    row = start + m // GROUP
    head = kv_head * GROUP + m % GROUP
    live = row < end
    d = tl.arange(0, DIM)
    q_mask = live[:, None] & (d < HEAD_DIM)[None]
    q = tl.load(q_ptr + row[:, None] * q_stride_row + head[:, None] * q_stride_head + d[None], mask=q_mask, other=0.0)
    position = tl.load(position_ptr + row, mask=live, other=-1).to(tl.int32)
    newest = tl.minimum(position, context - 1)
    if HAS_WINDOW:
        oldest = tl.min(tl.where(live, position, 2147483647), 0) - window + 1
        first += tl.maximum(oldest, 0) // BLOCK_N * BLOCK_N
        page = (first + tl.arange(0, BLOCK_N)) // BLOCK_SIZE
        block = tl.load(table_ptr + page, mask=page < table_width, other=0)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    if HAS_SINKS:  # in the first split only
        best = tl.load(sinks_ptr + head, mask=live & (m * 0 + split == 0), other=float("-inf")).to(tl.float32) * log2_e
    sink = best
    # summed over the keys at the end: within the loop it would cost the warps a barrier
    sums = tl.zeros([BLOCK_N, ROWS] if KEYS_FIRST else [ROWS, BLOCK_N], tl.float32)
    acc = tl.zeros([DIM, ROWS] if KEYS_FIRST else [ROWS, DIM], tl.float32)
    for n0 in range(first, context, step):
        n = n0 + tl.arange(0, BLOCK_N)
        slot = block.to(tl.int64) * BLOCK_SIZE + n % BLOCK_SIZE
        offset = (slot * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM)[:, None] + d[None]
        loaded = (n < context)[:, None]
        if DIM != HEAD_DIM:
            loaded = loaded & (d < HEAD_DIM)[None]
        # The blocks of the next tile are looked up a tile ahead: keys whose address waits for a load of the same tile
        # would be fetched with half of the pipeline's depth.
        page = (n + step) // BLOCK_SIZE
        block = tl.load(table_ptr + page, mask=page < table_width, other=0)
        k = tl.load(k_ptr + offset, mask=loaded, other=0.0).to(q.dtype)
        v = tl.load(v_ptr + offset, mask=loaded, other=0.0).to(q.dtype)
        if KEYS_FIRST:
            scores = tl.dot(k, tl.trans(q), input_precision="ieee")
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if HAS_SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores * scale / softcap) - 1)
        keys = tl.expand_dims(n, 1 - KEYS)
        seen = keys <= tl.expand_dims(newest, KEYS)
        if HAS_WINDOW:
            seen = seen & (keys > tl.expand_dims(position, KEYS) - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_best = tl.maximum(best, tl.max(scores, KEYS) * to_log2)
        safe = tl.where(new_best == float("-inf"), 0.0, new_best)
        weights = tl.exp2(scores * to_log2 - tl.expand_dims(safe, KEYS))
        shrink = tl.exp2(best - safe)
        sums = sums * tl.expand_dims(shrink, KEYS) + weights
        acc = acc * tl.expand_dims(shrink, KEYS)
        if KEYS_FIRST:
            acc += tl.dot(tl.trans(v), weights.to(q.dtype), input_precision="ieee")
        else:
            acc += tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        best = new_best

    total = tl.sum(sums, KEYS)
    if HAS_SINKS:  # it takes probability and gives nothing
        total += tl.exp2(sink - tl.where(sink == float("-inf"), 0.0, best))
    if KEYS_FIRST:
        acc = tl.trans(acc)
    cell = row * (NUM_KV_HEADS * GROUP) + head
    if IS_SPLIT:
        cell = split.to(tl.int64) * num_rows * (NUM_KV_HEADS * GROUP) + cell
        tl.store(part_ptr + cell[:, None] * HEAD_DIM + d[None], acc, mask=q_mask)
        tl.store(best_ptr + cell, best / log2_e, mask=live)
        tl.store(total_ptr + cell, total, mask=live)
    else:
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        tl.store(out_ptr + cell[:, None] * HEAD_DIM + d[None], acc.to(out_ptr.dtype.element_ty), mask=q_mask)


def decode_attention_triton(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    config: DecodeConfig,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    is_chained: bool = False,
) -> Tensor:
    """As `peagle.target.paged_attention.paged_attention`, nothing read back; one launch, or two when keys are split.

    q [T, Hq, D]; no request may have more than batch.max_query_len rows. is_chained: launched early (`early_launch`).
    """
    rows, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    group = num_heads // num_kv_heads
    requests = len(batch.query_start) - 1
    num_splits = useful_splits(config, batch.max_context_len)
    out = torch.empty((rows, num_heads, head_dim), dtype=q.dtype, device=q.device)
    part = best = total = out
    early_join = is_chained or (config.early_join and num_splits > 1)
    if num_splits > 1:
        part = torch.empty((num_splits, rows, num_heads, head_dim), dtype=torch.float32, device=q.device)
        best, total = torch.empty((2, num_splits, rows, num_heads), dtype=torch.float32, device=q.device)
    _decode_attention_kernel[(num_kv_heads, requests, num_splits)](
        out, part, best, total,
        q, k_cache, v_cache, sinks if sinks is not None else q,
        batch.positions, batch.query_start, batch.context_lens, batch.block_tables,
        rows, batch.max_query_len, batch.block_tables.stride(0), batch.block_tables.shape[1], q.stride(0), q.stride(1),
        scale, sliding_window or 0, softcap or 0.0,
        BLOCK_SIZE=block_size, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim,
        DIM=max(16, triton.next_power_of_2(head_dim)), ROWS=tile_rows(batch.max_query_len, group),
        BLOCK_N=config.block_n, KEYS_FIRST=config.keys_first,
        HAS_SINKS=sinks is not None, HAS_WINDOW=sliding_window is not None, HAS_SOFTCAP=bool(softcap),
        # as many rows as that leave no request fewer than the others: then nobody waits for query_start
        IS_UNIFORM=rows == requests * batch.max_query_len,
        IS_SPLIT=num_splits > 1, EARLY_JOIN=early_join, IS_CHAINED=is_chained,
        num_warps=config.num_warps, num_stages=config.num_stages, **early_launch(is_chained),
    )  # fmt: skip
    if num_splits > 1:
        join_splits(out, part, best, total, early_join)
    return out
