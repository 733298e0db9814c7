"""The exact sequence partition (docs/method.md): the gradients of the flat pass with the memory of one chunk.

Depth-0 rows see depth-0 rows alone. So their keys and values can be computed once without a graph; then the chunks run
from last to first with a graph, each reading the keys and values before it as leaves. A chunk's backward starts from
its loss and from its own depth-0 keys and values, seeded with what later chunks' leaves have received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.training.attention import Backend, KeysValues, RowAttention
from peagle.training.chunks import Chunk
from peagle.training.eagle3 import forward_steps

# (normed rows [T, H], chunk) -> (loss, a scalar with a graph; statistics, added up over chunks)
ChunkLoss = Callable[[Tensor, Chunk], tuple[Tensor, Tensor]]


@dataclass
class PassResult:
    """Summed over the chunks of a pack: the loss (scalar, detached) and the loss function's statistics."""

    loss: Tensor
    stats: Tensor


def forward_chunk(drafter: Drafter, chunk: Chunk, aux: Tensor, attention: RowAttention) -> Tensor:
    """Normed rows [T, H] of a chunk. aux [N, 3H]: the pack's auxiliary states."""
    if chunk.steps:
        return forward_steps(drafter, chunk, aux, attention)
    hidden, token = drafter.combine(aux[chunk.start : chunk.end]), chunk.token[: chunk.num_anchors + 1]
    if chunk.num_rows > chunk.num_anchors:  # MTP rows are alike: the first of them stands for all, and for fillers
        hidden = torch.cat((hidden, drafter.mask_state()[None]))
    normed, _ = drafter(drafter.embed(token), hidden, chunk.position, attention.over(0, chunk.num_rows))
    return normed


def depth0_keys_values(drafter: Drafter, chunk: Chunk, aux: Tensor, attention: RowAttention) -> list[KeysValues]:
    """Keys and values of the chunk's depth-0 rows at every layer, without a graph."""
    n, last = chunk.num_anchors, drafter.config.num_hidden_layers - 1
    attend = attention.over(0, n)

    def attend_but_last(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        if layer < last:
            return attend(layer, q, k, v)
        attention.passes[layer] = [(k, v)]
        return None  # nobody reads the last layer's output here

    hidden = drafter.combine(aux[chunk.start : chunk.end])
    drafter(drafter.embed(chunk.token[:n]), hidden, chunk.position[:n], attend_but_last)
    return [attention.depth0(layer) for layer in range(last + 1)]


def train_pack(
    drafter: Drafter, chunks: Sequence[Chunk], aux: Tensor, chunk_loss: ChunkLoss, backend: Backend
) -> PassResult:
    """Forward and backward over one pack; gradients are added to the parameters' `.grad`.

    chunks: the pack's, in order, covering all of its N anchors. One chunk is the flat pass (a single graph, no second
    depth-0 forward); more are the partition.
    """
    if len(chunks) == 1:
        loss, stats = chunk_loss(forward_chunk(drafter, chunks[0], aux, RowAttention(chunks[0], backend)), chunks[0])
        loss.backward()
        return PassResult(loss.detach(), stats)
    return _train_partitioned(drafter, chunks, aux, chunk_loss, backend)


def forward_pack(
    drafter: Drafter, chunks: Sequence[Chunk], aux: Tensor, backend: Backend
) -> Iterator[tuple[Chunk, Tensor]]:
    """(chunk, normed rows [T, H]) of every chunk in order, without gradients and with the memory of one chunk."""
    store = _buffers(drafter, chunks, drafter.fc.weight.dtype) if len(chunks) > 1 else None
    for chunk in chunks:
        prefix = _prefix(store, chunk, backend) if store is not None else None
        attention = RowAttention(chunk, backend, *(prefix or (None, 0)))
        yield chunk, forward_chunk(drafter, chunk, aux, attention)
        _keep(store or [], chunk, [attention.depth0(layer) for layer in range(len(store or []))])


def _buffers(drafter: Drafter, chunks: Sequence[Chunk], dtype: torch.dtype) -> list[KeysValues]:
    """Zeros for one key and one value of every anchor at every layer, [N, Hkv, D] each."""
    config = drafter.config
    shape = (chunks[-1].end, config.num_key_value_heads, config.head_dim)
    device = drafter.fc.weight.device
    return [
        (torch.zeros(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device))
        for _ in range(config.num_hidden_layers)
    ]


def _keep(store: Sequence[KeysValues], chunk: Chunk, made: Sequence[KeysValues]) -> None:
    for (k_all, v_all), (k, v) in zip(store, made, strict=True):
        k_all[chunk.start : chunk.end] = k
        v_all[chunk.start : chunk.end] = v


def _prefix(store: Sequence[KeysValues], chunk: Chunk, backend: Backend) -> tuple[list[KeysValues], int] | None:
    """What a chunk may see of the stored depth-0 keys and values, and the anchor where it begins.

    From the start of the document that the chunk begins in. Flex: the whole buffer, masked, so that every chunk has one
    shape and compiles once.
    """
    if backend == "flex":
        return list(store), 0
    start = int(chunk.first[0])
    if start == chunk.start:
        return None
    return [(k[start : chunk.start], v[start : chunk.start]) for k, v in store], start


def _train_partitioned(
    drafter: Drafter, chunks: Sequence[Chunk], aux: Tensor, chunk_loss: ChunkLoss, backend: Backend
) -> PassResult:
    dtype = drafter.fc.weight.dtype
    store = _buffers(drafter, chunks, dtype)
    # gradients that later chunks leave: sums of many, so in float32 at least
    owed = _buffers(drafter, chunks, torch.promote_types(dtype, torch.float32))

    with torch.no_grad():
        for chunk in chunks[:-1]:  # nobody comes after the last one
            prefix = _prefix(store, chunk, backend)
            made = depth0_keys_values(drafter, chunk, aux, RowAttention(chunk, backend, *(prefix or (None, 0))))
            _keep(store, chunk, made)

    total: PassResult | None = None
    for chunk in reversed(chunks):
        prefix = _prefix(store, chunk, backend)
        leaves: list[KeysValues] | None = None
        start = 0
        if prefix is not None:
            leaves = [(k.detach().requires_grad_(), v.detach().requires_grad_()) for k, v in prefix[0]]
            start = prefix[1]
        attention = RowAttention(chunk, backend, leaves, start)
        loss, stats = chunk_loss(forward_chunk(drafter, chunk, aux, attention), chunk)
        outputs, seeds = [loss], [torch.ones_like(loss)]
        if chunk is not chunks[-1]:
            for layer in range(len(store)):
                for own, grad in zip(attention.depth0(layer), owed[layer], strict=True):
                    outputs.append(own)
                    seeds.append(grad[chunk.start : chunk.end].to(own.dtype))
        torch.autograd.backward(outputs, seeds)
        for layer, leaf in enumerate(leaves or ()):
            for tensor, grad in zip(leaf, owed[layer], strict=True):
                if tensor.grad is not None:
                    grad[start : chunk.start] += tensor.grad[: chunk.start - start]
        loss = loss.detach()
        total = PassResult(loss, stats) if total is None else PassResult(total.loss + loss, total.stats + stats)
    assert total is not None, "a pack has at least one chunk"
    return total
