"""Linear layers with oneDNN's packed weights: what makes extra rows nearly free on a CPU.

PyTorch's plain fp32 linear reads the weight as it lies; with 2 to 16 rows that runs at half the speed of one row or
less. oneDNN lays the weight out once for such products. `docs/benchmarks.md` holds the measurement.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

# Rows the layout is chosen for: best over 1..16 rows, what decoding and verification run.
PACKED_ROWS = 16


class PackedLinear(nn.Module):
    """Inference-only fp32 CPU linear. `weight` stays readable where others read it (tied embeddings), else it goes."""

    def __init__(self, linear: nn.Linear, keep_weight: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_ROWS)
        self.bias = linear.bias
        self.weight = linear.weight if keep_weight else None

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


def can_pack() -> bool:
    """Whether this build of PyTorch has oneDNN with the packed operators."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


def pack_linears(module: nn.Module, keep: tuple[nn.Module, ...] = ()) -> int:
    """Replace every fp32 CPU nn.Linear below `module` by a packed one; returns how many.

    `keep` names linears whose weight others read (the LM head). Modules of other classes (experts as one tensor,
    quantised layers) are left alone.
    """
    if not can_pack():
        return 0
    return replace_linears(module, lambda linear: PackedLinear(linear, any(linear is k for k in keep)))


def replace_linears(module: nn.Module, make: Callable[[nn.Linear], nn.Module | None]) -> int:
    """Put what `make` returns in the place of every fp32 CPU nn.Linear below `module`, where it returns something."""
    count = 0
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.dtype == torch.float32 and child.weight.device.type == "cpu":
                made = make(child)
                if made is not None:
                    setattr(parent, name, made)
                    count += 1
    return count
