"""Loss over the supervised rows, a slice at a time, so that V-wide logits exist for one slice only.

Rows come ordered by teacher, so that the target's logits are made once a position and slice, not once a row.
The gradient with respect to the rows is computed in the forward pass of each slice (as Liger Kernel does for fused
linear cross-entropy); the backward pass only multiplies it by the incoming scalar.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from peagle.training.chunks import LossRows

LossKind = Literal["soft", "hard"]
LossKernel = Literal["triton", "compile", "plain"]
SliceFunction = Callable[..., tuple[Tensor, Tensor, Tensor]]


def soft_slice(
    logits: Tensor, teacher: Tensor, index: Tensor, weight: Tensor, target_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(teacher || drafter) of S rows.

    logits [S, Vd], teacher [U, V], index [S]: each row's teacher, weight [S]; target_ids [Vd]: the target id of each
    draft id (None: Vd = V). With a
    reduced draft vocabulary the teacher's probabilities are restricted to it and renormalised. Returns the KL of each
    row [S] (unweighted), the gradient of the weighted sum with respect to the logits [S, Vd], and whether the drafter's
    first choice is the teacher's over the whole vocabulary [S].
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    best = teacher.argmax(-1)
    if target_ids is not None:
        teacher = teacher[:, target_ids]
    logits, teacher, low = logits.to(wide), teacher.to(wide), logits
    log_q = logits - logits.logsumexp(-1, keepdim=True)
    log_p = (teacher - teacher.logsumexp(-1, keepdim=True))[index]
    p = log_p.exp()
    # a teacher may rule tokens out with -inf logits
    loss = torch.where(p > 0, p * (log_p - log_q), 0.0).sum(-1)
    gradient = ((log_q.exp() - p) * weight[:, None]).to(low.dtype)
    choice = low.argmax(-1)
    if target_ids is not None:
        choice = target_ids[choice]
    return loss, gradient, choice == best[index]


def hard_slice(
    logits: Tensor, token: Tensor, weight: Tensor, best: Tensor | None, target_ids: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of S rows against token [S] (draft ids).

    The first choice is compared with best [S] (the teacher's, target ids) when given, otherwise with the token.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    low, logits = logits, logits.to(wide)
    log_q = logits - logits.logsumexp(-1, keepdim=True)
    loss = -log_q.gather(1, token[:, None])[:, 0]
    hot = torch.arange(logits.shape[1], device=logits.device) == token[:, None]
    gradient = ((log_q.exp() - hot.to(wide)) * weight[:, None]).to(low.dtype)
    choice = low.argmax(-1)
    if best is None:
        return loss, gradient, choice == token
    return loss, gradient, (choice if target_ids is None else target_ids[choice]) == best


class _FirstThatRuns:
    """The fastest of several forms of a slice function; one that fails is dropped, once and with a warning."""

    def __init__(self, forms: list[tuple[str, Callable[[], SliceFunction]]]) -> None:
        self.forms = forms
        self.function: SliceFunction | None = None

    def __call__(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        while len(self.forms) > 1:
            try:
                if self.function is None:
                    self.function = self.forms[0][1]()
                return self.function(*args)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # whatever the compiler stack raises
                name, following = self.forms[0][0], self.forms[1][0]
                warnings.warn(f"{name} failed, {following} takes its place: {error}", stacklevel=2)
                self.forms, self.function = self.forms[1:], None
        return self.forms[0][1]()(*args)


def _triton_form() -> SliceFunction:
    from peagle.kernels.soft_loss import soft_slice_triton

    return soft_slice_triton


@functools.cache
def slice_function(kind: LossKind, kernel: LossKernel) -> SliceFunction:
    """The function of a slice: `kernel` and, should it fail, the slower forms after it."""
    plain: SliceFunction = soft_slice if kind == "soft" else hard_slice
    if kernel == "plain":
        return plain
    # slices differ in their rows: one compilation for all of them
    forms: list[tuple[str, Callable[[], SliceFunction]]] = [
        (f"the compiled {plain.__name__}", lambda: torch.compile(plain, dynamic=True)),
        (f"the plain {plain.__name__}", lambda: plain),
    ]
    if kernel == "triton" and kind == "soft":
        forms.insert(0, ("the Triton loss kernel", _triton_form))
    return _FirstThatRuns(forms)


@dataclass(frozen=True)
class LossSettings:
    """What does not change from step to step. depths: K."""

    kind: LossKind
    depths: int
    kernel: LossKernel = "plain"
    target_ids: Tensor | None = None  # [Vd] target id of each draft id, None for the whole vocabulary
    unreached_weight: float = 1.0  # of rows that drafting would not reach, see `reached_rows`


def on_first_choice(token: Tensor, best: Tensor, target_ids: Tensor | None) -> Tensor:
    """Is the text's token [S] (draft ids, -1: none) the teacher's first choice [S] (target ids)?"""
    if target_ids is None:
        return token == best
    return (token >= 0) & (target_ids[token.clamp(min=0)] == best)


def reached_rows(rows: LossRows, right: Tensor, positions: int, depths: int) -> Tensor:
    """Would drafting reach a row? [R] bool: every row before it in its chain is right; padding is.

    right [R] bool: the drafter's first choice is the teacher's, and the text goes on with it. A draft counts only when
    all before it were accepted, so the rows after the first that is not add noise and take capacity: they are guesses
    about a text that inference never sees. positions: N, of which anchors are indices. Nothing waits for the device.
    """
    count = rows.count
    anchor, depth = rows.anchor[:count], rows.depth[:count]
    grid = torch.zeros(positions, depths + 1, dtype=torch.uint8, device=right.device)
    grid[:, 0] = 1  # depth 0 is always reached
    grid[anchor, depth + 1] = right[:count].to(torch.uint8)
    reached = torch.ones_like(right)
    reached[:count] = grid.cumprod(1)[anchor, depth].bool()
    return reached


class _SlicedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        normed: Tensor,
        head: Tensor,
        rows: LossRows,
        hidden: Tensor,
        lm_logits: Callable[[Tensor], Tensor],
        settings: LossSettings,
        use_teacher: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        total = rows.index.shape[0]
        with_rows, with_head = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        weight_dtype = torch.promote_types(normed.dtype, torch.float32)
        matrix = head.detach().to(normed.dtype)
        row_gradient = normed.new_zeros(total, normed.shape[1]) if with_rows else None
        head_gradient = torch.zeros_like(head, dtype=weight_dtype) if with_head else None
        losses = torch.empty(total, dtype=weight_dtype, device=normed.device)
        matches = torch.empty(total, dtype=torch.bool, device=normed.device)
        function = slice_function(settings.kind, settings.kernel)
        weights = rows.weight.to(weight_dtype)
        select = settings.unreached_weight != 1.0
        on_text = torch.empty(total if select else 0, dtype=torch.bool, device=normed.device)
        for lo, hi, first, end in rows.slices:
            part = slice(lo, hi)
            x = normed[rows.index[part]]
            logits = x @ matrix.T
            of = rows.teacher[part] - first
            best = None
            if settings.kind == "soft":
                teacher = lm_logits(hidden[rows.positions[first:end]])
                if select:
                    best = teacher.argmax(-1)[of]
                loss, gradient, match = function(logits, teacher, of, weights[part], settings.target_ids)
            else:
                if use_teacher or select:
                    best = lm_logits(hidden[rows.positions[first:end]]).argmax(-1)[of]
                loss, gradient, match = function(logits, rows.token[part], weights[part], best, settings.target_ids)
            if select:
                assert best is not None
                on_text[part] = on_first_choice(rows.token[part], best, settings.target_ids)
            losses[part] = loss
            matches[part] = match
            if row_gradient is not None:
                torch.matmul(gradient, matrix, out=row_gradient[part])
            if head_gradient is not None:
                head_gradient += (gradient.T @ x).to(weight_dtype)
        if select:
            # a row's gradient is linear in its weight, so the weight may come after it (but not for an own LM head)
            assert head_gradient is None, "unreached_weight needs an LM head that is not trained"
            reached = reached_rows(rows, matches & on_text, hidden.shape[0], settings.depths)
            factor = torch.where(reached, 1.0, settings.unreached_weight).to(weight_dtype)
            weights = weights * factor
            if row_gradient is not None:
                row_gradient *= factor[:, None].to(row_gradient.dtype)
        ctx.save_for_backward(rows.index)
        ctx.row_gradient, ctx.head_gradient = row_gradient, head_gradient
        ctx.shape = normed.shape
        ctx.mark_non_differentiable(losses, matches)
        return (losses * weights).sum(), losses, matches

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_unused: Tensor) -> tuple[Any, ...]:
        (index,) = ctx.saved_tensors
        rows = head = None
        if ctx.row_gradient is not None:
            rows = ctx.row_gradient.new_zeros(ctx.shape)
            # only padding repeats an index, and its gradient is 0
            rows.index_add_(0, index, ctx.row_gradient * gradient.to(ctx.row_gradient.dtype))
        if ctx.head_gradient is not None:
            head = ctx.head_gradient * gradient.to(ctx.head_gradient.dtype)
        return rows, head, None, None, None, None, None


@dataclass
class LossResult:
    """loss: the weighted sum (scalar, with a graph); stats [3, K]: loss, matches and rows of each depth, as sums;
    matches [R]: of each row, in the rows' order (padding included)."""

    loss: Tensor
    stats: Tensor
    matches: Tensor


def head_loss(
    normed: Tensor,
    head: Tensor,
    rows: LossRows,
    hidden: Tensor,
    lm_logits: Callable[[Tensor], Tensor],
    settings: LossSettings,
    use_teacher: bool = False,
) -> LossResult:
    """Loss of a chunk's supervised rows.

    normed [T, H]: the drafter's rows; head [Vd, H]: its LM head; hidden [N, H]: the pack's target states, of which
    `lm_logits` makes the teacher's logits. For hard targets `use_teacher` compares first choices with the teacher's
    instead of the token (costs the teacher's logits; validation does). Nothing here waits for the device.
    """
    if rows.index.shape[0] == 0:  # still part of the graph: every process of a collective needs its gradients
        zero = normed.sum() * 0.0
        stats = torch.zeros(3, settings.depths, dtype=torch.float64, device=normed.device)
        return LossResult(zero, stats, torch.zeros(0, dtype=torch.bool, device=normed.device))
    loss, losses, matches = _SlicedLoss.apply(normed, head, rows, hidden, lm_logits, settings, use_teacher)
    real = rows.weight > 0
    values = torch.stack((losses.double(), matches.double(), torch.ones_like(losses, dtype=torch.float64))) * real
    stats = torch.zeros(3, settings.depths, dtype=torch.float64, device=normed.device)
    stats.index_add_(1, rows.depth, values)
    return LossResult(loss, stats, matches)
