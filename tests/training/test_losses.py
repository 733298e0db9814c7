"""Sliced losses against plain autograd over all rows at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.training.chunks import LossRows, make_loss_rows
from peagle.training.draft_vocab import choose_draft_vocab
from peagle.training.losses import LossSettings, head_loss

V, H, ROWS, K = 37, 8, 25, 4


def make(slice_rows: int, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor, Tensor, LossRows]:
    torch.manual_seed(0)
    normed = torch.randn(40, H, dtype=torch.float64, requires_grad=True)
    head = torch.randn(V, H, dtype=torch.float64, requires_grad=True)
    hidden, teacher_head = torch.randn(30, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    index = torch.randperm(40)[:ROWS]
    rows = make_loss_rows(
        index,
        torch.randint(0, 30, (ROWS,)),
        torch.randint(0, V, (ROWS,)),
        torch.randint(0, K, (ROWS,)),
        torch.rand(ROWS, dtype=torch.float64) + 0.1,
        index,
        slice_rows,
        multiple,
    )
    return normed, head, hidden, teacher_head, rows


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("slice_rows", [1, 4, 25, 64])
@pytest.mark.parametrize("reduced", [False, True])
def test_loss_gradient_and_statistics(kind: str, slice_rows: int, reduced: bool) -> None:
    normed, head, hidden, teacher_head, rows = make(slice_rows, 3 if slice_rows == 4 else 1)
    assert max(hi - lo for lo, hi, _, _ in rows.slices) <= slice_rows + 2
    ids = None
    if reduced:
        ids = choose_draft_vocab(torch.arange(V).numpy()[::-1].copy(), 20).target_ids
        head = head[:20].detach().requires_grad_()
        rows = LossRows(**{**vars(rows), "token": rows.token % 20})
    settings = LossSettings(kind, K, target_ids=ids)  # type: ignore[arg-type]
    result = head_loss(normed, head, rows, hidden, lambda h: h @ teacher_head.T, settings, use_teacher=True)
    (result.loss * 3.0).backward()

    n, h = normed.detach().requires_grad_(), head.detach().requires_grad_()
    real = slice(0, ROWS)
    logits = n[rows.index[real]] @ h.T
    teacher = hidden[rows.positions[rows.teacher[real]]] @ teacher_head.T
    best = teacher.argmax(-1)
    if ids is not None:
        teacher = teacher[:, ids]
    if kind == "soft":
        each = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    else:
        each = F.cross_entropy(logits, rows.token[real], reduction="none")
    expected = (each * rows.weight[real]).sum()
    (expected * 3.0).backward()
    assert torch.allclose(result.loss, expected)
    assert torch.allclose(normed.grad, n.grad)
    assert torch.allclose(head.grad, h.grad)
    choice = logits.argmax(-1) if ids is None else ids[logits.argmax(-1)]
    for depth in range(K):
        of = rows.depth[real] == depth
        assert torch.allclose(result.stats[0, depth], each[of].sum())
        assert result.stats[1, depth] == (choice == best)[of].sum()
        assert result.stats[2, depth] == of.sum()


def test_no_supervised_rows_still_has_a_graph() -> None:
    normed, head, hidden, teacher_head, _ = make(1)
    none, long = torch.zeros(0), torch.zeros(0, dtype=torch.int64)
    empty = make_loss_rows(long, long, long, long, none, long, 8, 4)
    assert empty.slices == ()
    result = head_loss(normed, head, empty, hidden, lambda h: h @ teacher_head.T, LossSettings("soft", K))
    result.loss.backward()
    assert not normed.grad.any()


def test_teacher_may_rule_tokens_out() -> None:
    normed, head, hidden, teacher_head, rows = make(8)

    def masked(h: Tensor) -> Tensor:
        logits = h @ teacher_head.T
        logits[:, 5] = -torch.inf
        return logits

    result = head_loss(normed, head, rows, hidden, masked, LossSettings("soft", K))
    result.loss.backward()
    assert result.loss.isfinite()
    assert normed.grad.isfinite().all()


def test_no_gradient_is_computed_where_none_is_wanted() -> None:
    normed, head, hidden, teacher_head, rows = make(8)
    with torch.no_grad():
        result = head_loss(normed, head, rows, hidden, lambda h: h @ teacher_head.T, LossSettings("soft", K))
    assert result.loss.grad_fn is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_compiled_slices(kind: str) -> None:
    normed, head, hidden, teacher_head, rows = make(8)
    found = []
    for kernel in ("plain", "compile", "triton"):
        x, w = normed.detach().float().cuda().requires_grad_(), head.detach().float().cuda()
        moved = LossRows(**{k: v.cuda() if isinstance(v, Tensor) else v for k, v in vars(rows).items()})
        settings = LossSettings(kind, K, kernel=kernel)  # type: ignore[arg-type]
        t = teacher_head.float().cuda()
        result = head_loss(x, w, moved, hidden.float().cuda(), lambda h, t=t: h @ t.T, settings, use_teacher=True)
        result.loss.backward()
        found.append((result.loss, x.grad, result.stats))
    for plain, *fast in zip(*found, strict=True):
        assert all(torch.allclose(plain, other, rtol=1e-3, atol=1e-5) for other in fast)


@pytest.mark.parametrize("kind", ["soft", "hard"])
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("slice_rows", [3, 64])
def test_rows_that_drafting_would_not_reach_weigh_less(kind: str, reduced: bool, slice_rows: int) -> None:
    """Against a loop over chains: a row counts in full only behind drafts that are the target's and the text's."""
    torch.manual_seed(1)
    positions, kept = 40, 0.25
    head, teacher_head = torch.randn(V, H, dtype=torch.float64), torch.randn(V, H, dtype=torch.float64)
    hidden = torch.randn(positions, H, dtype=torch.float64)
    target_ids = torch.arange(0, V, 2) if reduced else None
    draft_ids = torch.full((V,), -1)
    draft_ids[torch.arange(V) if target_ids is None else target_ids] = torch.arange(V if target_ids is None else 19)
    if reduced:
        head = head[:19]
    best = (hidden @ teacher_head.T).argmax(-1)
    text = best.clone()
    text[::5] = (text[::5] + 1) % V  # where the text left the first choice
    chains = [(p, d) for p in range(30) for d in range(int(torch.randint(1, K + 1, (1,))))]
    if kind == "hard":
        chains = [(p, d) for p, d in chains if draft_ids[text[p + d + 1]] >= 0]
    anchor, depth = (torch.tensor(x) for x in zip(*chains, strict=True))
    at = anchor + depth + 1
    weight = torch.rand(len(chains), dtype=torch.float64) + 0.1
    # rows near their teachers, so that many first choices agree
    normed = torch.randn(len(chains), H, dtype=torch.float64)
    wanted = draft_ids[best[at]]
    normed = (normed + 8 * torch.where((wanted >= 0)[:, None], head[wanted.clamp(min=0)], 0.0)).requires_grad_()
    with torch.no_grad():
        normed[::7] = torch.randn_like(normed[::7])
    rows = make_loss_rows(torch.arange(len(chains)), at, draft_ids[text[at]], depth, weight, anchor, slice_rows, 4)
    settings = LossSettings(kind, K, target_ids=target_ids, unreached_weight=kept)  # type: ignore[arg-type]
    result = head_loss(normed, head, rows, hidden, lambda h: h @ teacher_head.T, settings)
    (result.loss * 2.0).backward()

    n = normed.detach().requires_grad_()
    logits = n @ head.T
    choice = logits.argmax(-1) if target_ids is None else target_ids[logits.argmax(-1)]
    right = (choice == best[at]) & (text[at] == best[at])
    place = {chain: i for i, chain in enumerate(chains)}
    factor = torch.ones(len(chains), dtype=torch.float64)
    for i, (p, d) in enumerate(chains):
        if not all((p, e) in place and right[place[p, e]] for e in range(d)):
            factor[i] = kept
    assert 0.2 < (factor == 1).double().mean() < 0.95  # both happen
    teacher = hidden[at] @ teacher_head.T
    if target_ids is not None:
        teacher = teacher[:, target_ids]
    if kind == "soft":
        each = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True).sum(-1)
    else:
        each = F.cross_entropy(logits, draft_ids[text[at]], reduction="none")
    expected = (each * weight * factor).sum()
    (expected * 2.0).backward()
    assert torch.allclose(result.loss, expected)
    assert torch.allclose(normed.grad, n.grad)
    assert result.stats[2].sum() == len(chains)  # the statistics count every row
