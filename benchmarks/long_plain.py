"""The plain way for the benchmarks of long sequences: all rows at once, the mask as FlexAttention makes it; and
attention alone, ours beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from long_common import measure, seconds_of
from long_head import Training, make_chunks, sampled_rows
from torch import Tensor

from peagle.drafter.model import Attend
from peagle.training.attention import RowAttention, _flex_attention
from peagle.training.chunks import Chunk
from peagle.training.partition import forward_chunk
from peagle.training.rows import PAD_DEPTH


def by_depth(chunk: Chunk) -> Chunk:
    """The same rows, depth after depth: the order that they are sampled in when nobody thinks of tiles."""
    order = torch.where(chunk.depth == PAD_DEPTH, 1 << 20, chunk.depth).argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    moved = {name: getattr(chunk, name)[order] for name in ("token", "position", "anchor", "first", "depth")}
    return replace(chunk, **moved, loss=replace(chunk.loss, index=place[chunk.loss.index]))


@functools.cache
def compiled_block_mask() -> Callable[..., Any]:
    """FlexAttention's own function; uncompiled it would write out all [N K, N K] pairs."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False)


class PlainAttention:
    """All rows at once under the rule of attention, made into a block mask by FlexAttention's own function."""

    def __init__(self, chunk: Chunk) -> None:
        anchor, first, depth = chunk.anchor.int(), chunk.first.int(), chunk.depth.int()

        def visible(_batch: Any, _head: Any, q: Tensor, k: Tensor) -> Tensor:
            context = (depth[k] == 0) & (anchor[k] <= anchor[q]) & (anchor[k] >= first[q])
            chain = (depth[k] > 0) & (anchor[k] == anchor[q]) & (depth[k] <= depth[q])
            return context | chain

        rows = torch.arange(chunk.num_rows, device=anchor.device)
        self.flex = anchor.device.type == "cuda"
        self.mask: Any = None
        if self.flex:
            count = chunk.num_rows
            self.mask = compiled_block_mask()(visible, None, None, count, count, device=anchor.device.type)
        else:
            self.mask = visible(None, None, rows[:, None], rows)

    def over(self, _lo: int, _hi: int) -> Attend:
        def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
            if self.flex:
                out = _flex_attention("cuda")(q, k, v, block_mask=self.mask, enable_gqa=True)
            else:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=True)
            return out[0].transpose(0, 1)

        return attend


def flat_loss(training: Training, chunk: Chunk, aux: Tensor, hidden: Tensor) -> Tensor:
    """Forward over all rows of a sequence in one graph."""
    normed = forward_chunk(training.copy.compute, chunk, aux, PlainAttention(chunk))  # type: ignore[arg-type]
    return training.chunk_loss(hidden)(normed, chunk)[0]


def flat(training: Training, length: int, times: int) -> dict[str, Any]:
    """One optimizer step over all N K rows of a sequence at once, none sampled away."""
    (chunk,) = make_chunks(training, sampled_rows(training.shape, length, 1.0), length)
    chunk = by_depth(chunk)
    aux, hidden = training.states(length)

    def step() -> None:
        flat_loss(training, chunk, aux, hidden).backward()
        training.update()

    try:
        step()
        return measure(training.device, length, step, times) | {"rows": chunk.num_rows}
    finally:
        training.forget()


def matmul_rate(device: torch.device, size: int) -> float:
    """FLOP/s of a square bf16 matrix product."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = 20 if device.type == "cuda" else 2
    product = lambda: [a @ b for _ in range(times)]  # noqa: E731
    product()
    return 2.0 * size**3 * times / seconds_of(device, product)


def allowed_pairs(chunk: Chunk) -> int:
    """Pairs (row, row it sees) that the rule of attention allows, fillers left out."""
    real = chunk.depth >= 0
    return int(((chunk.anchor - chunk.first + 1 + chunk.depth) * real).sum())


def attention_alone(training: Training, length: int, times: int) -> dict[str, Any]:
    """Forward and backward of one layer's attention over the sampled rows of a sequence: the trainer's, FlexAttention
    with tiles from the rows' extremes, and FlexAttention's own way."""
    shape, device = training.shape, training.device
    (chunk,) = make_chunks(training, sampled_rows(shape, length, shape.keep_rate), length)
    pairs = allowed_pairs(chunk)
    flops = 4.0 * pairs * shape.head_dim * shape.heads
    found: dict[str, Any] = {"length": length, "rows": chunk.num_rows, "pairs": pairs}

    def make(heads: int) -> Tensor:
        return torch.randn(chunk.num_rows, heads, shape.head_dim, device=device, dtype=training.dtype).requires_grad_()

    q, k, v = make(shape.heads), make(shape.kv_heads), make(shape.kv_heads)
    gradient = torch.randn_like(q)
    ways: dict[str, Callable[[], Attend]] = {
        "ours": lambda: RowAttention(chunk, training.backend).over(0, chunk.num_rows),
        **(
            {"flex": lambda: RowAttention(chunk, "flex").over(0, chunk.num_rows)} if training.backend == "flash" else {}
        ),
        "plain": lambda: PlainAttention(by_depth(chunk)).over(0, chunk.num_rows),
    }
    if training.backend == "flash":
        ways["flex"] = lambda: RowAttention(chunk, "flex").over(0, chunk.num_rows)
    for name, way in ways.items():
        attend = way()
        torch.autograd.grad(attend(0, q, k, v), (q, k, v), gradient)
        masks = seconds_of(device, lambda way=way: [way() for _ in range(times)]) / times  # type: ignore[misc]
        forward = backward = 0.0
        for _ in range(times):
            attend = way()
            outs: list[Tensor] = []
            forward += seconds_of(device, lambda a=attend, o=outs: o.append(a(0, q, k, v)))  # type: ignore[misc]
            backward += seconds_of(device, lambda o=outs: torch.autograd.grad(o[0], (q, k, v), gradient))  # type: ignore[misc]
        found[name] = {
            "mask_seconds": masks,
            "forward_seconds": forward / times,
            "backward_seconds": backward / times,
            "forward_flops": flops * times / forward,
            "backward_flops": 2.5 * flops * times / backward,
        }
    return found


def show_attention(found: dict[str, Any], rate: float | None) -> None:
    for name in [name for name in ("ours", "flex", "plain") if name in found]:
        row = found[name]
        parts = []
        for way in ("forward", "backward"):
            share = f" ({row[f'{way}_flops'] / rate:.0%} of the matmul rate)" if rate else ""
            parts.append(f"{way} {1e3 * row[f'{way}_seconds']:.2f} ms, {row[f'{way}_flops'] / 1e12:.1f} TFLOP/s{share}")
        print(f"attention, {name:<6} {'; '.join(parts)}; mask {1e3 * row['mask_seconds']:.2f} ms", flush=True)
