"""KL(teacher || drafter) and its gradient in Triton; the twin in plain PyTorch is `peagle.training.losses.soft_slice`.

Two kernels. The first reads each teacher row once (online softmax: maximum and sum together, first choice on the way).
The second reads each drafter row twice, the second time from the cache, and writes the gradient over the logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = tl.constexpr(-1e30)  # a finite start: -inf minus -inf would be NaN in blocks that a teacher rules out


@triton.jit
def _teacher_kernel(  # type: ignore[no-untyped-def]
    teacher, ids, lse_out, best_out, vocab, draft_vocab, REDUCED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    base = teacher + row * vocab
    top = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    best = tl.full((), 0, tl.int32)
    best_value = tl.full((), float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(base + cols, mask=cols < vocab, other=float("-inf")).to(tl.float32)
        high, at = tl.max(x, 0, return_indices=True)
        best = tl.where(high > best_value, start + at, best)
        best_value = tl.maximum(best_value, high)
        if not REDUCED:
            new = tl.maximum(top, high)
            total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
            top = new
    if REDUCED:
        for start in range(0, draft_vocab, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            inside = cols < draft_vocab
            at = tl.load(ids + cols, mask=inside, other=0)
            x = tl.load(base + at, mask=inside, other=float("-inf")).to(tl.float32)
            new = tl.maximum(top, tl.max(x, 0))
            total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
            top = new
    tl.store(lse_out + row, top + tl.log(total))
    tl.store(best_out + row, best)


@triton.jit
def _loss_kernel(  # type: ignore[no-untyped-def]
    logits, teacher, index, weight, ids, lse_in, best_in, loss_out, match_out, vocab, draft_vocab,
    REDUCED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    own = logits + row * draft_vocab
    which = tl.load(index + row)
    base = teacher + which.to(tl.int64) * vocab
    lse_p = tl.load(lse_in + which)
    w = tl.load(weight + row)
    top = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    choice = tl.full((), 0, tl.int32)
    best_value = tl.full((), float("-inf"), tl.float32)
    for start in range(0, draft_vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(own + cols, mask=cols < draft_vocab, other=float("-inf")).to(tl.float32)
        high, at = tl.max(x, 0, return_indices=True)
        choice = tl.where(high > best_value, start + at, choice)
        best_value = tl.maximum(best_value, high)
        new = tl.maximum(top, high)
        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)
        top = new
    lse_q = top + tl.log(total)
    loss = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, draft_vocab, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        inside = cols < draft_vocab
        log_q = tl.load(own + cols, mask=inside, other=float("-inf")).to(tl.float32) - lse_q
        at = tl.load(ids + cols, mask=inside, other=0) if REDUCED else cols
        log_p = tl.load(base + at, mask=inside, other=float("-inf")).to(tl.float32) - lse_p
        p = tl.exp(log_p)
        loss += tl.where(p > 0, p * (log_p - log_q), 0.0)
        gradient = (tl.exp(log_q) - p) * w
        tl.store(own + cols, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(loss_out + row, tl.sum(loss, 0))
    if REDUCED:
        choice = tl.load(ids + choice).to(tl.int32)
    tl.store(match_out + row, (choice == tl.load(best_in + which)).to(tl.int8))


def soft_slice_triton(
    logits: Tensor, teacher: Tensor, index: Tensor, weight: Tensor, target_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As `soft_slice`, in float32 arithmetic; the gradient takes the place of the logits, which are lost.

    logits [S, Vd] and teacher [U, V] contiguous, index [S] int64 (row of the teacher), weight [S] float32.
    """
    logits, teacher = logits.contiguous(), teacher.contiguous()
    rows, draft_vocab = logits.shape
    positions, vocab = teacher.shape
    reduced = target_ids is not None
    ids = target_ids if target_ids is not None else index  # never read when not reduced
    lse = torch.empty(positions, dtype=torch.float32, device=logits.device)
    best = torch.empty(positions, dtype=torch.int32, device=logits.device)
    loss = torch.empty(rows, dtype=torch.float32, device=logits.device)
    match = torch.empty(rows, dtype=torch.int8, device=logits.device)
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _teacher_kernel[(positions,)](
        teacher, ids, lse, best, vocab, draft_vocab, REDUCED=reduced, BLOCK=block, num_warps=8
    )
    _loss_kernel[(rows,)](
        logits, teacher, index, weight, ids, lse, best, loss, match, vocab, draft_vocab,
        REDUCED=reduced, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return loss, logits, match.bool()
