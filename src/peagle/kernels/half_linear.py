"""Linear layers with float16 weights and float32 inputs and sums, on a CPU: FBGEMM's, which PyTorch brings along.

With a few rows a product costs what reading its weights costs, and these are half as long; with many it costs the same
as in float32. Where float16 holds a weight exactly, as it does a checkpoint's in float16 and nearly always one's in
bfloat16, nothing is lost: the products differ from float32's by the order of their sums only, so that a target runs
this way too. A drafter always does: nothing depends on its logits but which tokens are drafted (float16 rounds what is
below 6e-5 to 6e-8). `docs/benchmarks.md` holds the measurement, `docs/engine.md` why it is not int8.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from peagle.kernels.packed_linear import replace_linears

HALF_MAX = torch.finfo(torch.float16).max
SLICE = 1 << 18  # weights that are looked at together: they stay in a core's cache


class HalfLinear(nn.Module):
    """Inference-only fp32 CPU linear, rows [..., T, in] to [..., T, out]. `weight` stays where others read it."""

    def __init__(self, linear: nn.Linear, keep_weight: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.product = half_product(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        self.weight = linear.weight if keep_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x)


class _Product(nn.Module):
    """A packed weight and the one call that reads it."""

    def __init__(self, packed: torch.ScriptObject) -> None:
        super().__init__()
        self.packed = packed

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.quantized.linear_dynamic_fp16(x, self.packed)


def half_product(weight: Tensor, bias: Tensor | None = None) -> Callable[[Tensor], Tensor]:
    """An fp32 weight [out, in] laid out in float16, as what computes rows [..., T, in] -> [..., T, out]; a single row
    needs its dimension too.

    FBGEMM takes up to six rows at once and adds up one or two that are left over in another order, so that the last
    bits of a row may depend on how many there are, as they do with PyTorch's own products.
    """
    product = _Product(torch.ops.quantized.linear_prepack_fp16(weight, bias))
    try:  # handing a packed weight over from Python takes as long as a small product; a scripted module holds it
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.script(product).forward
    except Exception:  # a PyTorch that no longer scripts: the same, some microseconds slower
        return product.forward


@cache
def has_half() -> bool:
    """Whether this build of PyTorch has these products: it is tried, for some have the operators without the code."""
    weight = torch.tensor([[1.0, 2.0], [-0.5, 4.0], [0.25, 8.0]])
    rows = torch.tensor([[1.0, -1.0], [2.0, 0.5]])
    try:
        return torch.equal(half_product(weight)(rows), rows @ weight.T)
    except (AttributeError, RuntimeError):  # no such operator, or one without code on this machine
        return False


def fits_half(weight: Tensor) -> bool:
    """Whether no weight lies beyond float16's range."""
    low, high = torch.aminmax(weight)
    return bool(low >= -HALF_MAX) and bool(high <= HALF_MAX)


def is_half(weight: Tensor) -> bool:
    """Whether float16 holds every weight (none of them infinite) exactly."""
    rows = max(SLICE // max(weight.shape[-1], 1), 1)
    return all(torch.equal(part.half().float(), part) for part in weight.split(rows))


def halve_linears(module: nn.Module, keep: tuple[nn.Module, ...] = (), exact: bool = False) -> int:
    """Replace every fp32 CPU nn.Linear below `module` whose weights fit by a `HalfLinear`; returns how many.

    `keep` names linears whose weight others read. exact: only where nothing is rounded.
    """
    if not has_half():
        return 0
    fits = is_half if exact else fits_half
    return replace_linears(
        module, lambda linear: HalfLinear(linear, any(linear is k for k in keep)) if fits(linear.weight) else None
    )
