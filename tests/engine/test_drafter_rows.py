"""What the engine gives the drafter: its logits at every depth, and the cache it leaves (docs/method.md, "Rows")."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.drafter import Drafter
from peagle.engine import Engine
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, greedy, make_engine, replay, tiny_head

PROMPT = SEQUENCES[5]


def dense_attend(drafter: Drafter, sees: Tensor) -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Attention of T rows among each other by a mask [T, T]."""
    group = drafter.config.num_attention_heads // drafter.config.num_key_value_heads

    def attend(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), sees)
        return out.transpose(0, 1)

    return attend


def band(rows: int, window: int | None) -> Tensor:
    """Which rows each sees: itself and those before it, so many at most."""
    sees = torch.ones(rows, rows, dtype=torch.bool).tril()
    return sees if window is None else sees.triu(1 - window)


def dense_p_eagle(
    drafter: Drafter, tokens: list[int], aux: Tensor, anchor: int, depths: int, window: int | None = None
) -> Tensor:
    """Logits of depths 0..depths-1 at one anchor, by rows and mask as section 2 writes them."""
    mask_token = drafter.config.mask_token_id
    assert mask_token is not None
    ids = torch.tensor(tokens[1 : anchor + 2] + [mask_token] * (depths - 1))
    hidden = torch.cat((drafter.combine(aux[: anchor + 1]), drafter.mask_state().expand(depths - 1, -1)))
    positions = torch.arange(anchor + depths)  # of depth j at anchor p: p + j
    normed, _ = drafter(drafter.embed(ids), hidden, positions, dense_attend(drafter, band(len(ids), window)))
    return drafter.logits(normed[anchor:])


def dense_eagle3(
    drafter: Drafter, tokens: list[int], aux: Tensor, anchor: int, depths: int, window: int | None = None
) -> Tensor:
    """The same for EAGLE-3: every pass appends a row made of the one before."""
    ids, hidden = torch.tensor(tokens[1 : anchor + 2]), drafter.combine(aux[: anchor + 1])
    logits = []
    for _ in range(depths):
        sees = band(len(ids), window)
        normed, feedback = drafter(drafter.embed(ids), hidden, torch.arange(len(ids)), dense_attend(drafter, sees))
        logits.append(drafter.logits(normed[-1:]))
        ids = torch.cat((ids, drafter.to_target_ids(logits[-1].argmax(-1))))
        hidden = torch.cat((hidden, feedback[-1:]))
    return torch.cat(logits)


def record(engine: Engine) -> list[tuple[int, Tensor]]:
    """(anchor, drafter logits of its depths) of every step of a one-request engine, filled while it runs."""
    steps: list[tuple[int, Tensor]] = []
    logits: list[Tensor] = []
    drafter = engine.drafter
    assert drafter is not None
    inner, store = drafter.logits, engine.runner.lanes.store_drafts

    def logits_kept(normed: Tensor) -> Tensor:
        logits.append(inner(normed))
        return logits[-1]

    def stored(drafts: Tensor, num_drafts: Tensor, lane_offset: Tensor, next_position: Tensor) -> None:
        if logits:
            steps.append((int(next_position[0]) - 1, torch.cat(logits)))
            logits.clear()
        store(drafts, num_drafts, lane_offset, next_position)

    drafter.logits = logits_kept  # type: ignore[method-assign]
    engine.runner.lanes.store_drafts = stored  # type: ignore[method-assign]
    return steps


@pytest.mark.parametrize(("batched_tokens", "window"), [(5, None), (1024, None), (5, 7), (1024, 1), (1024, 20)])
@pytest.mark.parametrize(
    ("kind", "norms"),
    [
        ("p-eagle", {}),
        ("p-eagle", {"norm_before_residual": True, "norm_before_fc": True}),
        ("eagle3", {}),
        ("eagle3", {"norm_output": True, "fc_norm": True}),
    ],
)
def test_logits_equal_a_dense_forward(
    target: Target, plain: list[list[int]], kind: str, norms: dict[str, bool], batched_tokens: int, window: int | None
) -> None:
    k = 5
    drafter = tiny_head(target, kind, layers=2, **norms)
    engine = make_engine(target, drafter, k, draft_window=window, block_size=4, max_num_batched_tokens=batched_tokens)
    replay(engine, {"0": PROMPT + plain[5]}, [0, 3, 5, 1, 4, 2])
    steps = record(engine)
    request = engine.add_request("0", PROMPT, greedy(30))
    while engine.has_unfinished:
        engine.step()
    tokens = request.token_ids
    with torch.inference_mode():
        aux = target.encode(torch.tensor([tokens]), drafter.config.aux_hidden_state_layer_ids).aux[0]
        dense = dense_p_eagle if kind == "p-eagle" else dense_eagle3
        assert len(steps) > 8
        assert len({len(logits) for _, logits in steps}) > 1  # towards its end the request drafts less
        for anchor, logits in steps:
            expected = dense(drafter, tokens, aux, anchor, len(logits), window)
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def drafter_cache(engine: Engine, blocks: list[int], positions: int) -> list[Tensor]:
    """Keys and values of a request's first positions, per layer."""
    assert engine.runner.draft_pass is not None
    caches = [pool for layer in engine.runner.draft_pass.kv_cache for pool in layer]
    return [pool[torch.tensor(blocks)].flatten(0, 1)[:positions] for pool in caches]


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("block_size", [1, 8])
def test_true_states_overwrite_drafted_ones(target: Target, plain: list[list[int]], kind: str, block_size: int) -> None:
    """After runs of every length the cache equals that of a fresh prefill of the same tokens."""
    drafter = tiny_head(target, kind)
    engine = make_engine(target, drafter, 4, block_size=block_size)
    replay(engine, {"0": PROMPT + plain[5]}, [4, 0, 2, 4, 1, 3])
    request = engine.add_request("0", PROMPT, greedy(40))
    while len(request.token_ids) < len(PROMPT) + 25:
        engine.step()
    cached = request.num_computed
    after_drafts = drafter_cache(engine, request.block_table, cached)

    fresh = make_engine(target, drafter, 4, block_size=block_size)
    again = fresh.add_request("0", request.token_ids[:cached], greedy(5))
    fresh.step()
    assert again.token_ids == request.token_ids[: cached + 1]
    for ours, expected in zip(after_drafts, drafter_cache(fresh, again.block_table, cached), strict=True):
        assert expected.abs().sum() > 0
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_chunked_prefill_leaves_the_same_cache(target: Target, kind: str) -> None:
    """The shift at a chunk's end takes the real next prompt token."""
    caches = []
    drafter = tiny_head(target, kind)
    for batched_tokens in (1024, 7, 1):
        engine = make_engine(target, drafter, 4, max_num_batched_tokens=batched_tokens, max_num_seqs=1)
        request = engine.add_request("0", PROMPT, greedy(5))
        while len(request.token_ids) == len(PROMPT):
            engine.step()
        caches.append(drafter_cache(engine, request.block_table, len(PROMPT)))
    for other in caches[1:]:
        for ours, expected in zip(other, caches[0], strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
