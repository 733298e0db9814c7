"""The fused drafter gives what `Drafter.forward` gives, in its cache too, and the engine the same tokens."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.engine.drafting import new_drafter_cache
from peagle.engine.fused_drafter import FusedDrafter
from peagle.target import Target
from peagle.target.paged_attention import PagedBatch, attend_paged
from tests.engine.helpers import SEQUENCES, greedy, make_engine, run, tiny_head


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("p-eagle", {}),
        ("p-eagle", {"norm_before_residual": True, "attention_bias": True}),
        ("eagle3", {"norm_output": True}),
    ],
)
def test_equals_the_drafter(target: Target, kind: str, options: dict[str, bool], window: int | None) -> None:
    drafter = tiny_head(target, kind, layers=3, **options)
    rows, h = 10, target.hidden_size
    embeds, hidden = torch.randn(rows, h), torch.randn(rows, h)
    positions = torch.tensor([3, 4, 5, 6, 0, 0, 1, 2, 0, 0])
    slots = torch.tensor([7, 8, 9, 10, -1, 16, 17, 18, -1, -1])
    tables = torch.tensor([[1, 2], [4, 5]], dtype=torch.int32)
    starts, contexts = torch.tensor([0, 5, 10], dtype=torch.int32), torch.tensor([7, 3], dtype=torch.int32)
    batch = PagedBatch(positions, starts, contexts, tables, slots, 5, 7)
    results: list[list[Tensor]] = []
    for fused in (False, True):
        caches = new_drafter_cache(drafter, 6, 4, torch.float32)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, caches=caches) -> Tensor:  # type: ignore[no-untyped-def]
            return attend_paged(q, k, v, caches[layer], batch, drafter.config.head_dim**-0.5, window)

        if fused:
            out = FusedDrafter(drafter, 128, window)(embeds, hidden, positions, caches, batch)
        else:
            out = drafter(embeds, hidden, positions, attend)
        results.append([*out, *(pool for layer in caches for pool in layer)])
    for ours, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_engine_drafts_the_same(target: Target, kind: str) -> None:
    drafter = tiny_head(target, kind, draft_vocab_size=8, own_lm_head=True)
    results = []
    for fused in (False, True):
        engine = make_engine(target, drafter, 4)
        assert engine.runner.draft_pass is not None
        if fused:
            engine.runner.draft_pass.fused = FusedDrafter(drafter, 128)
        results.append([(r.output_token_ids, r.metrics) for r in run(engine, SEQUENCES, greedy(30))])
    assert results[0] == results[1]
