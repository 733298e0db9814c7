"""The partition gives the flat pass's gradients, and the flat pass gives those of a plain masked transformer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from peagle.drafter import Drafter
from peagle.training import attention
from peagle.training.eagle3 import step_weights
from peagle.training.losses import LossSettings
from peagle.training.partition import train_pack
from peagle.training.rows import RowTable

from .helpers import HIDDEN, chunk_loss, chunks_of, flex_by_hand, table_of, tiny_drafter, tiny_pack

DEPTHS = 4


def gradients(drafter: Drafter) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    return found


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def states(n: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(n, 3 * HIDDEN, dtype=dtype), torch.randn(n, HIDDEN, dtype=dtype)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("loss", ["soft", "hard"])
def test_partition_equals_flat(kind: str, layers: int, loss: str) -> None:
    drafter = tiny_drafter(kind, layers, norm_before_fc=layers == 3, own_lm_head=layers == 3, own_embed_tokens=True)
    pack = tiny_pack()
    table = table_of(pack, kind, DEPTHS)
    aux, hidden = states(table.num_anchors)
    step_loss = chunk_loss(drafter, hidden, LossSettings(loss, DEPTHS))  # type: ignore[arg-type]
    flat = train_pack(drafter, chunks_of(pack, table, kind, table.num_anchors, DEPTHS), aux, step_loss, "dense")
    expected = gradients(drafter)
    assert set(expected) == {name for name, _ in drafter.named_parameters()}
    assert ("mask_hidden" in expected) == (kind == "p-eagle")
    for size in (1, 7, 64, table.num_anchors):
        part = train_pack(drafter, chunks_of(pack, table, kind, size, DEPTHS), aux, step_loss, "dense")
        found = gradients(drafter)
        assert torch.allclose(part.loss, flat.loss, rtol=1e-12)
        assert torch.allclose(part.stats, flat.stats, rtol=1e-10)
        worst = max(relative(found[name], expected[name]) for name in expected)
        assert worst < 1e-10, f"chunk size {size}: {worst}"


def naive_mask(table: RowTable, doc_ids: Tensor) -> Tensor:
    """Section 2's rule for every pair of rows, [T, T]; padding sees itself."""
    p, j = table.anchor[:, None], table.depth[:, None]
    a, d = table.anchor[None], table.depth[None]
    same = (doc_ids[p] == doc_ids[a]) & ((doc_ids[p] >= 0) | (p == a))
    return ((d == 0) & same & (a <= p)) | ((d >= 1) & (d <= j) & (a == p))


def naive_rows(drafter: Drafter, table: RowTable, doc_ids: Tensor, aux: Tensor, stepwise: bool) -> Tensor:
    """All rows at once (or step by step) under an explicit mask; normed rows in the table's order."""
    mask = naive_mask(table, doc_ids)
    n = table.num_anchors
    group = drafter.config.num_attention_heads // drafter.config.num_key_value_heads
    keys: dict[int, Tensor] = {}
    values: dict[int, Tensor] = {}

    def run(rows: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys.setdefault(layer, k.new_zeros(len(table.anchor), *k.shape[1:]))
            values.setdefault(layer, k.new_zeros(len(table.anchor), *k.shape[1:]))
            keys[layer] = keys[layer].index_put((rows,), k)
            values[layer] = values[layer].index_put((rows,), v)
            kk, vv = keys[layer].repeat_interleave(group, 1), values[layer].repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q, kk) / math.sqrt(q.shape[-1])
            scores = scores.masked_fill(~mask[rows], -math.inf)
            return torch.einsum("hqk,khd->qhd", scores.softmax(-1), vv)

        return drafter(drafter.embed(table.token[rows]), hidden, table.position[rows], attend)

    everything = torch.arange(len(table.anchor))
    if not stepwise:
        hidden = torch.cat((drafter.combine(aux), drafter.mask_state().expand(len(everything) - n, -1)))
        return run(everything, hidden)[0]
    out = torch.zeros(len(everything), drafter.config.hidden_size, dtype=aux.dtype)
    normed, feedback = run(everything[:n], drafter.combine(aux))
    out = out.index_put((everything[:n],), normed)
    latest = feedback
    for depth in range(1, int(table.depth.max()) + 1):
        rows = (table.depth == depth).nonzero()[:, 0]
        normed, feedback = run(rows, latest[table.anchor[rows]])
        out = out.index_put((rows,), normed)
        latest = latest.index_put((table.anchor[rows],), feedback)
    return out


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("backend", ["dense", "flex"])
def test_flat_equals_plain_masked_attention(kind: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # FlexAttention has no backward on a CPU: a stand-in reads the same block mask, tile by tile
    monkeypatch.setattr(attention, "_flex_attention", lambda _device: flex_by_hand)
    drafter = tiny_drafter(kind, 2)
    pack = tiny_pack((90, 40, 111), 15)
    table = table_of(pack, kind, DEPTHS)
    aux, hidden = states(table.num_anchors)
    torch.manual_seed(5)
    teacher = torch.log_softmax(hidden @ torch.randn(61, HIDDEN, dtype=hidden.dtype).T, -1)[table.teacher]
    normed = naive_rows(drafter, table, pack.doc_ids, aux, kind == "eagle3")
    student = torch.log_softmax(normed @ drafter.lm_head_weight().T, -1)
    kl = (teacher.exp() * (teacher - student)).sum(-1)
    decay = step_weights(DEPTHS)[table.depth] if kind == "eagle3" else torch.ones_like(kl)
    weight = decay * table.supervised
    loss = (kl * weight).sum() / weight.sum()
    loss.backward()
    expected = gradients(drafter)
    step_loss = chunk_loss(drafter, hidden, LossSettings("soft", DEPTHS))
    for size, multiple in ((table.num_anchors, 1), (table.num_anchors, 32), (100, 32)):  # filler rows change nothing
        chunks = chunks_of(pack, table, kind, size, DEPTHS, row_multiple=multiple)
        result = train_pack(drafter, chunks, aux, step_loss, backend)  # type: ignore[arg-type]
        found = gradients(drafter)
        assert torch.allclose(result.loss, loss.detach(), rtol=1e-12)
        assert max(relative(found[name], expected[name]) for name in expected) < 1e-10
