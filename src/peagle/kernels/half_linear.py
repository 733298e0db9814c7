"""Linear layers with float16 weights and float32 inputs and sums, on a CPU: FBGEMM's, which PyTorch brings along.

With a few rows a product costs what reading its weights costs, and these are half as long. For a drafter that is
free: nothing depends on its logits but which tokens are drafted, and what a head's bfloat16 weights say is kept
exactly (float16 has three bits more; what is below 6e-5 is rounded to 6e-8). `docs/benchmarks.md` holds the
measurement, `docs/engine.md` why it is not int8.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from peagle.kernels.packed_linear import replace_linears

HALF_MAX = torch.finfo(torch.float16).max


class HalfLinear(nn.Module):
    """Inference-only fp32 CPU linear, rows [..., T, in] to [..., T, out]. `weight` stays where others read it."""

    def __init__(self, linear: nn.Linear, keep_weight: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = pack_half(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
        self.weight = linear.weight if keep_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return run_half(x, self.packed)


def pack_half(weight: Tensor, bias: Tensor | None = None) -> torch.ScriptObject:
    """An fp32 weight [out, in] laid out as `run_half` reads it."""
    return torch.ops.quantized.linear_prepack_fp16(weight, bias)


def run_half(x: Tensor, packed: torch.ScriptObject) -> Tensor:
    """Rows [..., T, in] -> [..., T, out]; a single row needs its dimension too."""
    return torch.ops.quantized.linear_dynamic_fp16(x, packed)


@cache
def has_half() -> bool:
    """Whether this build of PyTorch has these products: it is tried, for some have the operators without the code."""
    weight = torch.tensor([[1.0, 2.0], [-0.5, 4.0], [0.25, 8.0]])
    rows = torch.tensor([[1.0, -1.0], [2.0, 0.5]])
    try:
        return torch.equal(run_half(rows, pack_half(weight)), rows @ weight.T)
    except (AttributeError, RuntimeError):  # no such operator, or one without code on this machine
        return False


def fits_half(weight: Tensor) -> bool:
    """Whether no weight lies beyond float16's range."""
    low, high = torch.aminmax(weight)
    return bool(low >= -HALF_MAX) and bool(high <= HALF_MAX)


def halve_linears(module: nn.Module, keep: tuple[nn.Module, ...] = ()) -> int:
    """Replace every fp32 CPU nn.Linear below `module` whose weights fit by a `HalfLinear`; returns how many.

    `keep` names linears whose weight others read.
    """
    if not has_half():
        return 0
    return replace_linears(
        module, lambda linear: HalfLinear(linear, any(linear is k for k in keep)) if fits_half(linear.weight) else None
    )
