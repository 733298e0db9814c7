"""Attention over rows (docs/method.md): row (p, j) sees the depth-0 rows of its document up to p, and (p, 1..j).

Three implementations of one rule. `dense` (any device, any dtype) scores each row against the depth-0 keys and against
its own chain's few keys, which are gathered; `flex` (CUDA) is FlexAttention with a block mask computed from the rows'
metadata; `flash` (Hopper, 16 bits) is FlashAttention 4 over the same blocks. None makes an [N K, N K] mask.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafter.model import Attend
from peagle.errors import InputError
from peagle.training.chunks import Chunk, round_up
from peagle.training.flash import flash_attention, flash_mask, flash_problem, key_codes, query_codes
from peagle.training.rows import PAD_DEPTH

Backend = Literal["dense", "flex", "flash"]
KeysValues = tuple[Tensor, Tensor]
BLOCK = 128


def choose_backend(attention: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """`auto` takes FlashAttention 4 where it can, else FlexAttention on a CUDA device, else the dense path.

    Raises InputError for an implementation by name that cannot be had here.
    """
    problem = flash_problem(device, dtype, head_dim)
    if attention == "flash" and problem is not None:
        raise InputError(f"attention: got 'flash', which {problem}")
    if attention == "flex" and device.type != "cuda":
        raise InputError(f"attention: got 'flex', which needs a CUDA device (this run is on {device})")
    if attention == "auto":
        return "dense" if device.type != "cuda" else "flex" if problem is not None else "flash"
    return cast(Backend, attention)


class RowAttention:
    """The `attend` callables of one chunk, and the keys and values that its rows have made so far.

    `prefix` holds each layer's depth-0 keys and values [P, Hkv, D] of the anchors [prefix_start, prefix_start + P);
    only those before the chunk are seen. Rows must be attended in order: a pass over [lo, hi) sees the earlier passes.
    """

    def __init__(
        self,
        chunk: Chunk,
        backend: Backend,
        prefix: Sequence[KeysValues] | None = None,
        prefix_start: int = 0,
    ) -> None:
        self.chunk = chunk
        self.backend = backend
        self.prefix = prefix
        self.prefix_start = prefix_start
        self.prefix_rows = 0 if prefix is None else int(prefix[0][0].shape[0])
        self.passes: dict[int, list[KeysValues]] = {}

    def over(self, lo: int, hi: int) -> Attend:
        """Attention for a pass of the drafter over rows [lo, hi) of the chunk."""
        run = {"dense": self._dense, "flex": self._flex, "flash": self._flash}[self.backend](lo, hi)
        before: dict[int, int] = {}  # passes that a layer had made before this one

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            made = self.passes.setdefault(layer, [])
            earlier = made[: before.setdefault(layer, len(made))]
            if len(made) == len(earlier):  # a checkpointed layer runs again in the backward; its first run is kept
                made.append((k, v))
            keys = torch.cat([*(pair[0] for pair in earlier), k]) if earlier else k
            values = torch.cat([*(pair[1] for pair in earlier), v]) if earlier else v
            return run(q, keys, values, None if self.prefix is None else self.prefix[layer])

        return attend

    def depth0(self, layer: int) -> KeysValues:
        """Keys and values of the chunk's own depth-0 rows, [n, Hkv, D] each."""
        k, v = self.passes[layer][0]
        n = self.chunk.num_anchors
        return k[:n], v[:n]

    # -- dense ----------------------------------------------------------------------------------------------------

    def _dense(self, lo: int, hi: int) -> Callable[[Tensor, Tensor, Tensor, KeysValues | None], Tensor]:
        chunk, n = self.chunk, self.chunk.num_anchors
        device = chunk.anchor.device
        context = torch.cat(
            (
                torch.arange(self.prefix_start, self.prefix_start + self.prefix_rows, device=device),
                torch.arange(chunk.start, chunk.end, device=device),
            )
        )
        # prefix rows at or after the chunk (a buffer of the whole pack) are the chunk's own, not computed there
        usable = torch.ones_like(context, dtype=torch.bool)
        usable[: self.prefix_rows] = context[: self.prefix_rows] < chunk.start
        anchor, first, depth = chunk.anchor[lo:hi], chunk.first[lo:hi], chunk.depth[lo:hi]
        mask = (context <= anchor[:, None]) & (context >= first[:, None]) & usable
        split = max(0, min(n, hi) - lo)  # rows before it are of depth 0 and have no chain
        width = 0
        own = own_ok = None
        if lo + split < hi:
            width = max(int(depth[split:].max()), 0)
        if width:
            slot = torch.arange(width, device=device)
            back = (depth[split:, None] - 1 - slot) * chunk.chain_stride
            own_ok = slot < depth[split:, None]
            own = torch.where(own_ok, torch.arange(lo + split, hi, device=device)[:, None] - back, 0)

        def run(q: Tensor, k: Tensor, v: Tensor, prefix: KeysValues | None) -> Tensor:
            ctx_k = k[:n] if prefix is None else torch.cat((prefix[0], k[:n]))
            ctx_v = v[:n] if prefix is None else torch.cat((prefix[1], v[:n]))
            parts = []
            if split:
                parts.append(_dense_attention(q[:split], ctx_k, ctx_v, mask[:split], None, None, None))
            if split < q.shape[0]:
                own_kv = None if own is None else (k[own], v[own])
                parts.append(
                    _dense_attention(
                        q[split:],
                        ctx_k,
                        ctx_v,
                        mask[split:],
                        None if own_kv is None else own_kv[0],
                        None if own_kv is None else own_kv[1],
                        own_ok,
                    )
                )
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return run

    # -- flex -----------------------------------------------------------------------------------------------------

    def _flex(self, lo: int, hi: int) -> Callable[[Tensor, Tensor, Tensor, KeysValues | None], Tensor]:
        # a stepwise chunk's later passes all get keys for the whole chunk, so that they share one compiled shape
        rows = self.chunk.num_rows if (self.chunk.steps and lo) else hi
        query, key = self._facts(lo, hi, rows)
        mask = flex_block_mask(*query, *key)
        fill_q = query[0].shape[0] - (hi - lo)
        missing = key[0].shape[0] - self.prefix_rows - hi

        def run(q: Tensor, k: Tensor, v: Tensor, prefix: KeysValues | None) -> Tensor:
            k, v = _after_prefix(k, v, prefix)
            if missing:
                k, v = F.pad(k, (0, 0, 0, 0, 0, missing)), F.pad(v, (0, 0, 0, 0, 0, missing))
            if fill_q:
                q = F.pad(q, (0, 0, 0, 0, 0, fill_q))
            heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
            out = _flex_attention(q.device.type)(*heads_first, block_mask=mask, enable_gqa=True)
            return out[0].transpose(0, 1)[: hi - lo]

        return run

    def _facts(self, lo: int, hi: int, rows: int) -> tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
        """What decides who sees whom, in whole tiles of int32: (anchor, first, depth) of the rows [lo, hi), and
        (anchor, depth) of the prefix's keys and the chunk's first `rows`, of which those from `hi` on are hidden."""
        chunk = self.chunk
        key_anchor, key_depth = chunk.anchor[:rows], chunk.depth[:rows]
        if rows > hi:
            key_depth = torch.cat((key_depth[:hi], torch.full_like(key_depth[hi:], PAD_DEPTH)))
        if self.prefix_rows:
            end = self.prefix_start + self.prefix_rows
            context = torch.arange(self.prefix_start, end, device=chunk.anchor.device)
            key_anchor = torch.cat((context, key_anchor))
            key_depth = torch.cat((torch.where(context < chunk.start, 0, PAD_DEPTH), key_depth))
        fill_k = round_up(key_anchor.shape[0], BLOCK) - key_anchor.shape[0]
        fill_q = round_up(hi - lo, BLOCK) - (hi - lo)
        query = (
            F.pad(chunk.anchor[lo:hi], (0, fill_q), value=chunk.start).int(),
            F.pad(chunk.first[lo:hi], (0, fill_q), value=chunk.start).int(),
            F.pad(chunk.depth[lo:hi], (0, fill_q), value=PAD_DEPTH).int(),
        )
        return query, (F.pad(key_anchor, (0, fill_k)).int(), F.pad(key_depth, (0, fill_k), value=PAD_DEPTH).int())

    # -- flash ----------------------------------------------------------------------------------------------------

    def _flash(self, lo: int, hi: int) -> Callable[[Tensor, Tensor, Tensor, KeysValues | None], Tensor]:
        query, key = self._facts(lo, hi, hi)
        mask = flash_mask([*query_codes(*query), key_codes(*key)], flex_block_mask(*query, *key))

        def run(q: Tensor, k: Tensor, v: Tensor, prefix: KeysValues | None) -> Tensor:
            return flash_attention(q, *_after_prefix(k, v, prefix), mask)

        return run


def _after_prefix(k: Tensor, v: Tensor, prefix: KeysValues | None) -> KeysValues:
    return (k, v) if prefix is None else (torch.cat((prefix[0], k)), torch.cat((prefix[1], v)))


def _dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    own_k: Tensor | None,
    own_v: Tensor | None,
    own_mask: Tensor | None,
) -> Tensor:
    """q [T, Hq, D]; context k, v [P, Hkv, D] under mask [T, P]; each row's own chain keys [T, W, Hkv, D] -> [T, Hq, D].

    Softmax over both together, in float32 or better.
    """
    rows, heads, dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    grouped = q.reshape(rows, kv_heads, group, dim).permute(1, 2, 0, 3)  # [Hkv, G, T, D]
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = 1.0 / math.sqrt(dim)
    flat = grouped.reshape(kv_heads, group * rows, dim)
    scores = torch.matmul(flat, k.permute(1, 2, 0)).view(kv_heads, group, rows, -1).to(wide) * scale
    scores = scores.masked_fill(~mask, -math.inf)
    if own_k is None or own_v is None or own_mask is None:
        weights = scores.softmax(-1).to(v.dtype)
        out = torch.matmul(weights.view(kv_heads, group * rows, -1), v.transpose(0, 1))
        return out.view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
    own_scores = torch.einsum("kgtd,twkd->kgtw", grouped, own_k).to(wide) * scale
    own_scores = own_scores.masked_fill(~own_mask, -math.inf)
    weights = torch.cat((scores, own_scores), dim=-1).softmax(-1).to(v.dtype)
    context, chain = weights.split((k.shape[0], own_k.shape[1]), dim=-1)
    out = torch.matmul(context.reshape(kv_heads, group * rows, -1), v.transpose(0, 1)).view(kv_heads, group, rows, dim)
    out = out + torch.einsum("kgtw,twkd->kgtd", chain, own_v)
    return out.permute(2, 0, 1, 3).reshape(rows, heads, dim)


@functools.cache
def _flex_attention(device_type: str) -> Callable[..., Any]:
    """FlexAttention, compiled on a GPU; its eager form (tests on the CPU) does the same arithmetic unfused."""
    from torch.nn.attention.flex_attention import flex_attention

    if device_type != "cuda":
        return flex_attention
    # one compilation a shape: chunks differ in the number of chain rows, rounded up to a few sizes
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    return torch.compile(flex_attention, dynamic=False)


def block_overlap(
    query_anchor: Tensor, query_first: Tensor, query_depth: Tensor, key_anchor: Tensor, key_depth: Tensor
) -> tuple[Tensor, Tensor]:
    """Which [BLOCK, BLOCK] tiles can hold a visible pair and which hold nothing else: (some, all) bool [Q/B, K/B].

    Decided from each block's extremes; `some` may name a tile that turns out empty, never miss one.
    """
    big = torch.iinfo(torch.int32).max

    def extremes(values: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
        blocks = values.view(-1, BLOCK)
        if valid is None:
            return blocks.amin(1), blocks.amax(1)
        chosen = valid.view(-1, BLOCK)
        return blocks.masked_fill(~chosen, big).amin(1), blocks.masked_fill(~chosen, -big).amax(1)

    anchor_min, anchor_max = extremes(query_anchor)
    first_min, first_max = extremes(query_first)
    chain_min, chain_max = extremes(query_anchor, query_depth > 0)
    key0_min, key0_max = extremes(key_anchor, key_depth == 0)
    own_min, own_max = extremes(key_anchor, key_depth > 0)
    all_depth0 = (key_depth == 0).view(-1, BLOCK).all(1)
    context = (key0_min <= anchor_max[:, None]) & (key0_max >= first_min[:, None])
    own = (own_min <= chain_max[:, None]) & (own_max >= chain_min[:, None])
    full = all_depth0 & (key0_min >= first_max[:, None]) & (key0_max <= anchor_min[:, None])
    return context | own, full


def flex_block_mask(
    query_anchor: Tensor, query_first: Tensor, query_depth: Tensor, key_anchor: Tensor, key_depth: Tensor
) -> Any:
    """FlexAttention's block mask for rows whose metadata (int32, lengths multiples of BLOCK) are given."""
    from torch.nn.attention.flex_attention import BlockMask

    def visible(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        own_anchor, other = query_anchor[q], key_anchor[k]
        depth = key_depth[k]
        context = (depth == 0) & (other <= own_anchor) & (other >= query_first[q])
        chain = (depth > 0) & (other == own_anchor) & (depth <= query_depth[q])
        return context | chain

    some, full = block_overlap(query_anchor, query_first, query_depth, key_anchor, key_depth)
    partial = some & ~full
    kv, full_kv = _ordered(partial), _ordered(full)
    mask = BlockMask.from_kv_blocks(
        *kv,
        *full_kv,
        BLOCK_SIZE=BLOCK,
        mask_mod=visible,
        seq_lengths=(query_anchor.shape[0], key_anchor.shape[0]),
        compute_q_blocks=False,  # its own transposition costs ten times these four sorts
    )
    mask.q_num_blocks, mask.q_indices = _ordered(partial.T)
    mask.full_q_num_blocks, mask.full_q_indices = _ordered(full.T)
    return mask


def _ordered(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """bool [A, B] -> (how many tiles of each row are set [1, 1, A], their columns first [1, 1, A, B]) as int32."""
    count = tiles.sum(1, dtype=torch.int32)
    columns = tiles.to(torch.int8).argsort(dim=1, descending=True, stable=True).to(torch.int32)
    # a single column of a transposed table would keep a stride that FlashAttention refuses, though it is contiguous
    return count[None, None].clone(memory_format=torch.contiguous_format), columns.reshape(-1).view(1, 1, *tiles.shape)
