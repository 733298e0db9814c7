"""Running requests over a paged cache step by step, as an engine would, for comparison with a dense forward."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle.target import Target
from peagle.target.paged_attention import PagedBatch


@dataclass
class Rows:
    """What one request runs in one step: tokens at positions start, start + 1, ..."""

    request: int
    start: int
    tokens: list[int]


class Paged:
    """Requests with scattered block tables over a cache that starts full of NaN, so that a wrong read shows."""

    def __init__(self, target: Target, num_requests: int, max_len: int, block_size: int, seed: int = 0) -> None:
        self.target, self.block_size = target, block_size
        width = -(-max_len // block_size)
        generator = torch.Generator().manual_seed(seed)
        self.tables = torch.randperm(num_requests * width + 3, generator=generator)[: num_requests * width]
        self.tables = self.tables.view(num_requests, width).int()
        self.cache = target.new_kv_cache(num_requests * width + 3, block_size)
        for k, v in self.cache:
            k.fill_(float("nan"))
            v.fill_(float("nan"))

    def batch(self, step: list[Rows]) -> tuple[Tensor, PagedBatch]:
        """The flat token ids of a step and its batch."""
        positions = torch.cat([torch.arange(r.start, r.start + len(r.tokens)) for r in step])
        tables = torch.cat([self.tables[r.request, None] for r in step])
        owner = torch.repeat_interleave(torch.arange(len(step)), torch.tensor([len(r.tokens) for r in step]))
        slots = tables[owner, positions // self.block_size].long() * self.block_size + positions % self.block_size
        contexts = [r.start + len(r.tokens) for r in step]
        starts = torch.tensor([0] + [len(r.tokens) for r in step]).cumsum(0).int()
        batch = PagedBatch(
            positions=positions,
            query_start=starts,
            context_lens=torch.tensor(contexts).int(),
            block_tables=tables,
            slot_mapping=slots,
            max_query_len=max(len(r.tokens) for r in step),
            max_context_len=max(contexts),
        )
        return torch.tensor([t for r in step for t in r.tokens]), batch

    def run(self, step: list[Rows], aux_ids: tuple[int, ...] = ()) -> list[tuple[Tensor, Tensor | None]]:
        """One forward; per entry of the step, its logits [rows, V] and auxiliary states [rows, 3H]."""
        tokens, batch = self.batch(step)
        logits, aux = self.target.forward_paged(
            tokens, batch.positions, batch, self.cache, torch.arange(len(tokens)), aux_ids
        )
        sizes = [len(r.tokens) for r in step]
        assert logits is not None
        pieces = aux.split(sizes) if aux is not None else [None] * len(sizes)
        return list(zip(logits.split(sizes), pieces, strict=True))


def dense(target: Target, tokens: list[int], aux_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Transformers' own logits [L, V] and the hidden states at aux_ids, concatenated [L, 3H]."""
    with torch.no_grad():
        out = target.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return out.logits[0], torch.cat([out.hidden_states[i][0] for i in aux_ids], dim=-1)
