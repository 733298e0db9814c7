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
# Below so many products of a request's scores a second CPU thread costs more than it does, and when another process
# has its core, many times as much.
ONE_THREADS_WORK = 1 << 21

KVCache = list[tuple[Tensor, Tensor]]  # per layer: K and V, each [num_blocks, block_size, Hkv, D]


@dataclass
class PagedBatch:
    """Where the T rows of R requests stand.

    positions [T] int64: position of each row in its request (for RoPE and for the mask); query_start [R+1] int32: rows
    of request r are query_start[r]:query_start[r+1]; context_lens [R] int32: cached positions of each request, this
    step's rows included; block_tables [R, max_blocks] int32; slot_mapping [T] int64: block * block_size + offset, or -1
    for a row that writes nothing. Rows behind the last request's are padding: what they give means nothing. The two
    maxima are host integers, so that nothing here waits for the device.
    """

    positions: Tensor
    query_start: Tensor
    context_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    max_query_len: int
    max_context_len: int
    views: list[_RequestView] | None = field(default=None, repr=False)  # filled by the PyTorch path
    _all_write: bool | None = field(default=None, repr=False)

    @property
    def all_write(self) -> bool:
        """Whether every row has a slot: asked once a step instead of in every layer, and on a GPU not at all."""
        if self._all_write is None:
            self._all_write = not self.slot_mapping.is_cuda and not bool((self.slot_mapping < 0).any())
        return self._all_write


def write_kv(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, all_write: bool = False
) -> None:
    """Write k and v [T, Hkv, D] into their slots; rows whose slot is -1 write nothing. all_write: none has.

    A cache in float8 holds numbers up to 448, and larger ones as that.
    """
    flat_k, flat_v = k_cache.view(-1, *k.shape[1:]), v_cache.view(-1, *v.shape[1:])
    if k.is_cuda:  # no boolean indexing: its result's size would have to be read back
        from peagle.kernels.paged_attention import write_kv_triton

        write_kv_triton(k, v, flat_k, flat_v, slot_mapping)
        return
    if not all_write and bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        k, v, slot_mapping = k[kept], v[kept], slot_mapping[kept]
    for flat, x in ((flat_k, k), (flat_v, v)):
        if flat.dtype is FP8:  # PyTorch moves float8 about only as bytes
            flat, x = flat.view(torch.uint8), x.clamp(-FP8_MAX, FP8_MAX).to(FP8).view(torch.uint8)
        flat.index_copy_(0, slot_mapping, x.to(flat.dtype))


@dataclass
class _RequestView:
    """One request of a batch as the PyTorch path reads it: its rows, its cached keys and what each row may see."""

    rows: slice
    context: int
    blocks: int | Tensor  # the first one where they happen to be consecutive, which saves a copy
    masks: dict[tuple[int | None, int], Tensor]  # by sliding window and group: 0 or -inf, [1, rows * group, keys]
    firsts: dict[int, int]  # by sliding window: the first position that a row sees


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
            blocks = ids[0] if consecutive else torch.tensor(ids, device=batch.positions.device)
            batch.views.append(_RequestView(slice(starts[r], starts[r + 1]), context, blocks, {}, {}))
    return batch.views


def _read(cache: Tensor, request: _RequestView, dtype: torch.dtype) -> tuple[Tensor, int]:
    """Memory that holds a request's positions one after another, [.., Hkv, D], and where in it they begin."""
    blocks = request.blocks
    if isinstance(blocks, int) and cache.dtype == dtype and cache.is_contiguous():
        return cache, int(cache.storage_offset()) + blocks * cache.stride(0)
    if isinstance(blocks, int):
        blocks = torch.arange(blocks, blocks - (-request.context // cache.shape[1]), device=cache.device)
    if cache.dtype is FP8:  # PyTorch moves float8 about only as bytes
        return cache.view(torch.uint8)[blocks].view(FP8).to(dtype), 0
    return cache[blocks].to(dtype), 0


def _first(request: _RequestView, batch: PagedBatch, window: int | None) -> int:
    """The first position that any row of a request sees; keys and values before it are not read."""
    if window is None or window >= request.context:
        return 0
    if window not in request.firsts:
        request.firsts[window] = max(int(batch.positions[request.rows].min()) - window + 1, 0)
    return request.firsts[window]


def _mask(request: _RequestView, batch: PagedBatch, window: int | None, group: int, dtype: torch.dtype) -> Tensor:
    """0 or -inf, [1, rows * group, keys from `_first` on]: the group's heads of a row lie one after another."""
    found = request.masks.get((window, group))
    if found is None:
        position = batch.positions[request.rows, None]
        keys = torch.arange(_first(request, batch, window), request.context, device=position.device)
        seen = keys <= position
        if window is not None:
            seen &= keys > position - window
        found = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, float("-inf"))
        found = request.masks[window, group] = found.repeat_interleave(group, 0)[None]
    return found


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
    views = _view(batch, k_cache.shape[1])
    if not views:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    threads = torch.get_num_threads()
    work = max((view.rows.stop - view.rows.start) * view.context for view in views) * q.shape[1] * q.shape[2]
    alone = threads > 1 and not q.is_cuda and work < ONE_THREADS_WORK
    if alone:
        torch.set_num_threads(1)
    try:
        outputs = [
            _attend_one(q, k_cache, v_cache, batch, view, scale, sliding_window, sinks, softcap) for view in views
        ]
    finally:
        if alone:
            torch.set_num_threads(threads)
    if (padding := len(q) - views[-1].rows.stop) > 0:
        outputs.append(q.new_zeros(padding, *q.shape[1:]))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_one(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    request: _RequestView,
    scale: float,
    sliding_window: int | None,
    sinks: Tensor | None,
    softcap: float | None,
) -> Tensor:
    """One request's rows of `paged_attention`, [rows, Hq, D].

    A step of few rows costs as much by its number of calls as by its arithmetic, hence the strides.
    """
    kv_heads, dim = k_cache.shape[2:]
    heads, first = q.shape[1], _first(request, batch, sliding_window)
    context = request.context - first
    group, query = heads // kv_heads, q[request.rows]
    n = len(query)
    (k, k_start), (v, v_start) = _read(k_cache, request, q.dtype), _read(v_cache, request, q.dtype)
    width = kv_heads * dim
    k_start, v_start = k_start + first * width, v_start + first * width
    values = v.as_strided((kv_heads, context, dim), (dim, width, 1), v_start)
    if n > 64 and sinks is None and not softcap:  # a prefill: never hold all of its scores
        keys = k.as_strided((kv_heads, context, dim), (dim, width, 1), k_start)
        mask = _mask(request, batch, sliding_window, 1, q.dtype)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)
    mask = _mask(request, batch, sliding_window, group, q.dtype)
    # [Hkv, rows * group, D]: the heads of a group share their keys in one product
    grouped = query.view(n, kv_heads, group, dim).transpose(0, 1).reshape(kv_heads, n * group, dim)
    keys = k.as_strided((kv_heads, dim, context), (dim, 1, width), k_start)
    if softcap:
        scores = softcap * torch.tanh(torch.bmm(grouped, keys) * (scale / softcap)) + mask
    else:
        scores = torch.baddbmm(mask, grouped, keys, alpha=scale)
    if sinks is None:
        weights = scores.softmax(dim=-1, dtype=torch.float32)
    else:
        extra = sinks.float().view(kv_heads, 1, group, 1).expand(-1, n, -1, 1).reshape(kv_heads, n * group, 1)
        weights = torch.cat((scores.float(), extra), dim=-1).softmax(dim=-1)[..., :-1]
    out = torch.bmm(weights.to(q.dtype), values)
    return out.view(kv_heads, n, group, dim).transpose(0, 1).reshape(n, heads, dim)


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
