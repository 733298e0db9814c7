"""Attention over a paged KV cache: what the target and the drafter both run in the engine.

Rows of all requests are flat (no padding). A row at position p of a request sees the request's cached positions 0..p,
whatever their order of arrival, which serves prefill, chunked prefill, verification of K drafts and MTP rows alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

FP8, FP8_MAX = torch.float8_e4m3fn, 448.0

KVCache = list[tuple[Tensor, Tensor]]  # per layer: K and V, each [num_blocks, block_size, Hkv, D]


@dataclass
class PagedBatch:
    """Where the T rows of R requests stand.

    positions [T] int64: position of each row in its request (for RoPE and for the mask); query_start [R+1] int32: rows
    of request r are query_start[r]:query_start[r+1]; context_lens [R] int32: cached positions of each request, this
    step's rows included; block_tables [R, max_blocks] int32; slot_mapping [T] int64: block * block_size + offset, or -1
    for a row that writes nothing. The two maxima are host integers, so that nothing here waits for the device.
    """

    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_context_len: int
    views: list[_RequestView] | None = field(default=None, repr=False)  # filled by the PyTorch path


def write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write k and v [T, Hkv, D] into their slots; rows whose slot is -1 write nothing.

    A cache in float8 holds numbers up to 448, and larger ones as that.
    """
    flat_k, flat_v = k_cache.view(-1, *k.shape[1:]), v_cache.view(-1, *v.shape[1:])
    if k.is_cuda:  # no boolean indexing: its result's size would have to be read back
        from peagle.kernels.paged_attention import write_kv_triton

        write_kv_triton(k, v, flat_k, flat_v, slot_mapping)
        return
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    for flat, x in ((flat_k, k), (flat_v, v)):
        if flat.dtype is FP8:  # PyTorch moves float8 about only as bytes
            flat, x = flat.view(torch.uint8), x.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        flat.index_copy_(0, slot_mapping, x.to(flat.dtype))


def _read(cache: Tensor, blocks: slice | Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """The first `count` positions of blocks, [count, Hkv, D]."""
    if cache.dtype is FP8:
        return cache.view(torch.uint8)[blocks].flatten(0, 1)[:count].view(FP8).to(dtype)
    return cache[blocks].flatten(0, 1)[:count].to(dtype)


@dataclass
class _RequestView:
    """One request of a batch as the PyTorch path reads it: its rows, its cached keys and what each row may see."""

    rows: slice
    context: int
    blocks: slice | Tensor  # a slice where the blocks happen to be consecutive: a view instead of a copy
    masks: dict[int | None, Tensor]  # by sliding window: 0 or -inf, [rows, context]


def _view(batch: PagedBatch, block_size: int) -> list[_RequestView]:
    """The requests of a batch, worked out once a step and kept with it for all its layers."""
    if batch.views is None:
        batch.views = []
        starts, contexts, tables = batch.query_start.tolist(), batch.context_lens.tolist(), batch.block_tables.tolist()
        for r, context in enumerate(contexts):
            if starts[r] == starts[r + 1]:
                continue
            ids = tables[r][: -(-context // block_size)]
            consecutive = ids == list(range(ids[0], ids[0] + len(ids)))
            blocks = (
                slice(ids[0], ids[0] + len(ids)) if consecutive else torch.tensor(ids, device=batch.positions.device)
            )
            batch.views.append(_RequestView(slice(starts[r], starts[r + 1]), context, blocks, {}))
    return batch.views


def _mask(request: _RequestView, batch: PagedBatch, window: int | None, dtype: torch.dtype) -> Tensor:
    if window not in request.masks:
        position = batch.positions[request.rows, None]
        keys = torch.arange(request.context, device=position.device)
        seen = keys <= position
        if window is not None:
            seen &= keys > position - window
        request.masks[window] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(
            ~seen, float("-inf")
        )
    return request.masks[window]


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """q [T, Hq, D] over the cache -> [T, Hq, D]. The PyTorch form: specification, CPU path and test reference.

    sliding_window w: a row at p sees p-w+1..p. sinks [Hq]: one extra logit a head that takes probability and gives
    nothing (gpt-oss). softcap c: scores become c * tanh(scores / c) (Gemma 2).
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kv_heads, dim = k_cache.shape[2:]
    group = q.shape[1] // kv_heads
    for request in _view(batch, k_cache.shape[1]):
        query = q[request.rows]
        n = len(query)
        k = _read(k_cache, request.blocks, request.context, q.dtype)  # [context, Hkv, D]
        v = _read(v_cache, request.blocks, request.context, q.dtype)
        mask = _mask(request, batch, sliding_window, q.dtype)
        if n > 64 and sinks is None and not softcap:  # a prefill: never hold all of its scores
            result = F.scaled_dot_product_attention(
                query.transpose(0, 1)[None],
                k.transpose(0, 1)[None].repeat_interleave(group, 1),
                v.transpose(0, 1)[None].repeat_interleave(group, 1),
                attn_mask=mask,
                scale=scale,
            )
            out[request.rows] = result[0].transpose(0, 1)
            continue
        # [Hkv, rows * group, D]: the heads of a group share their keys in one product
        grouped = query.view(n, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, n * group, dim)
        scores = torch.bmm(grouped, k.permute(1, 2, 0)).view(kv_heads, n, group, -1)
        scores = scores * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask[None, :, None]
        if sinks is None:
            weights = scores.softmax(dim=-1, dtype=torch.float32)
        else:
            extra = sinks.float().view(kv_heads, 1, group, 1).expand(-1, n, -1, 1)
            weights = torch.cat((scores.float(), extra), dim=-1).softmax(dim=-1)[..., :-1]
        result = torch.bmm(weights.to(v.dtype).reshape(kv_heads, n * group, -1), v.transpose(0, 1))
        out[request.rows] = result.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, -1, dim)
    return out


def attend_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: PagedBatch,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Write this step's keys and values, then attend: one layer's attention in the engine, on any device."""
    write_kv(k, v, *cache, batch.slot_mapping)
    return attend_written(q, cache, batch, scale, sliding_window, sinks, softcap)


def attend_written(
    q: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: PagedBatch,
    scale: float,
    sliding_window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention over a cache that holds this step's keys and values already."""
    if q.is_cuda:
        from peagle.kernels.paged_attention import paged_attention_triton

        return paged_attention_triton(q, *cache, batch, scale, sliding_window, sinks, softcap)
    return paged_attention(q, *cache, batch, scale, sliding_window, sinks, softcap)
