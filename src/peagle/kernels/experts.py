"""The experts of a mixture: each token's rows through k of E gated products, weighed and summed.

What is here is the specification and what a CPU runs; `experts_triton` is how a GPU computes it. Everything is rounded
to the rows' dtype where Transformers' modules round: gate and up with their bias, the activation, down with its bias,
and that times the routing weight. Products, what is between two roundings, and the sum over k are in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from peagle.kernels.mxfp4 import unpack_mxfp4


class Product(NamedTuple):
    """One product of each expert. weight [E, N, K] as the rows are, or MXFP4 blocks [E, N, K / 32, 16] uint8, then with
    scales [E, N, S] uint8, of which the first K / 32 count (`pad_scales`); bias [E, N] or None."""

    weight: Tensor
    scales: Tensor | None
    bias: Tensor | None

    @property
    def width(self) -> int:
        """N."""
        return self.weight.shape[1]

    @property
    def depth(self) -> int:
        """K."""
        return self.weight.shape[2] * (1 if self.scales is None else 32)

    def of(self, expert: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """An expert's weight [N, K] and bias [N], in float32 with the values that they have in `dtype`."""
        weight = self.weight[expert]
        if self.scales is not None:
            weight = unpack_mxfp4(weight, self.scales[expert, :, : weight.shape[1]], dtype)
        return weight.float(), None if self.bias is None else self.bias[expert].float()


class ExpertWeights(NamedTuple):
    """gate_up: N = 2I rows, the gates before the ups; down: N = H, K = I.

    limit None: SwiGLU, up * gate * sigmoid(alpha * gate) with alpha 1. Otherwise gpt-oss's: gate to at most `limit`, up
    to within `limit` of 0, then (up + 1) * gate * sigmoid(alpha * gate).
    """

    gate_up: Product
    down: Product
    alpha: float = 1.0
    limit: float | None = None

    @property
    def num_experts(self) -> int:
        return len(self.down.weight)


def pad_scales(scales: Tensor) -> Tensor:
    """Scales [E, N, G] with rows of a multiple of 16, so that a kernel reads several at once wherever it begins."""
    return torch.nn.functional.pad(scales, (0, -scales.shape[-1] % 16))


def activate(gate: Tensor, up: Tensor, alpha: float, limit: float | None) -> Tensor:
    """As ExpertWeights says, in float32."""
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    return up * (gate * torch.sigmoid(alpha * gate))


def experts_torch(hidden: Tensor, indices: Tensor, routing: Tensor, weights: ExpertWeights) -> Tensor:
    """hidden [T, H], indices [T, k] (of experts, int) and routing [T, k] -> [T, H]."""
    dtype, (rows, k) = hidden.dtype, indices.shape
    flat, pairs = indices.flatten(), hidden.new_zeros(rows * k, hidden.shape[1])
    for expert in range(weights.num_experts):
        mine = (flat == expert).nonzero()[:, 0]
        if not len(mine):
            continue
        weight, bias = weights.gate_up.of(expert, dtype)
        gate, up = torch.nn.functional.linear(hidden[mine // k].float(), weight, bias).to(dtype).float().chunk(2, -1)
        active = activate(gate, up, weights.alpha, weights.limit).to(dtype)
        weight, bias = weights.down.of(expert, dtype)
        pairs[mine] = torch.nn.functional.linear(active.float(), weight, bias).to(dtype)
    weighed = (pairs.float() * routing.flatten()[:, None].float()).to(dtype)
    return weighed.view(rows, k, -1).sum(dim=1, dtype=torch.float32).to(dtype)


def runs_experts(device: torch.device) -> bool:
    """Whether a GPU has the shared memory that `experts_triton`'s configurations take: those for data centres have
    (8.0, 9.0, 10.0), others have less."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) in ((8, 0), (9, 0), (10, 0), (10, 3))


def experts(hidden: Tensor, indices: Tensor, routing: Tensor, weights: ExpertWeights) -> Tensor:
    """As `experts_torch`; on a GPU without waiting for it, so that a CUDA graph can hold it."""
    if hidden.is_cuda:
        from peagle.kernels.experts_triton import experts_triton

        return experts_triton(hidden, indices, routing, weights)
    return experts_torch(hidden, indices, routing, weights)
