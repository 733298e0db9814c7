"""Mixtures of experts as `kernels.experts` computes them, in place of Transformers' modules."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.experts import ExpertWeights, Product, experts, pad_scales
from peagle.kernels.mxfp4 import pack_mxfp4

log = logging.getLogger(__name__)

WEIGHTS = {"gate_up_proj", "down_proj"}
BIASES = {"gate_up_proj_bias", "down_proj_bias"}
TRIAL_ROWS, TRIAL_EXPERTS = 12, 4
TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2}


class FusedExperts(nn.Module):
    """All experts of a layer, for inference: (hidden [T, H], indices [T, k], routing weights [T, k]) -> [T, H]."""

    gate_up_weight: Tensor
    gate_up_scales: Tensor | None
    gate_up_bias: Tensor | None
    down_weight: Tensor
    down_scales: Tensor | None
    down_bias: Tensor | None

    def __init__(self, weights: ExpertWeights) -> None:
        super().__init__()
        for name, product in (("gate_up", weights.gate_up), ("down", weights.down)):
            for part, tensor in zip(Product._fields, product, strict=True):
                kept = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
                self.register_parameter(f"{name}_{part}", kept)
        self.alpha, self.limit = weights.alpha, weights.limit

    @property
    def weights(self) -> ExpertWeights:
        gate_up = Product(self.gate_up_weight, self.gate_up_scales, self.gate_up_bias)
        down = Product(self.down_weight, self.down_scales, self.down_bias)
        return ExpertWeights(gate_up, down, self.alpha, self.limit)

    def forward(self, hidden_states: Tensor, indices: Tensor, routing_weights: Tensor) -> Tensor:
        return experts(hidden_states, indices, routing_weights, self.weights)

    def extra_repr(self) -> str:
        forms = {True: "MXFP4", False: str(self.down_weight.dtype).removeprefix("torch.")}
        gate_up, down = (forms[scales is not None] for scales in (self.gate_up_scales, self.down_scales))
        return f"{self.weights.num_experts}, gate_up={gate_up}, down={down}, limit={self.limit}"


def read_experts(module: nn.Module) -> ExpertWeights | None:
    """The weights of a module that is laid out as Transformers' mixtures are, copied where another layout is needed,
    and as MXFP4 where that loses nothing; None for others. What the module computes with them is another question."""
    parameters: dict[str, Tensor] = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
    # what `use_experts_implementation` says of a class
    transposed, concatenated = (getattr(module, name, None) for name in ("is_transposed", "is_concatenated"))
    if parameters.keys() not in (WEIGHTS, WEIGHTS | BIASES) or None in (transposed, concatenated):
        return None
    gate_up, down = (parameters[name] for name in ("gate_up_proj", "down_proj"))
    if gate_up.dim() != 3 or down.dim() != 3 or gate_up.dtype not in TOLERANCE or down.dtype != gate_up.dtype:
        return None
    if transposed:
        gate_up, down = gate_up.mT, down.mT
    num_experts, height, width = gate_up.shape
    if height % 2 or down.shape != (num_experts, width, height // 2):
        return None
    bias = parameters.get("gate_up_proj_bias")
    gate_up = _gates_first(gate_up, bool(concatenated))
    bias = None if bias is None else _gates_first(bias, bool(concatenated)).flatten(1).contiguous()
    alpha, limit = getattr(module, "alpha", 1.0), getattr(module, "limit", None)
    return ExpertWeights(
        _stored(gate_up, bias),
        _stored(down[:, None], parameters.get("down_proj_bias")),
        float(alpha),
        None if limit is None else float(limit),
    )


def _gates_first(tensor: Tensor, concatenated: bool) -> Tensor:
    """[E, 2I, ...] -> a view [E, 2, I, ...], gates before ups."""
    return tensor.unflatten(1, (2, -1)) if concatenated else tensor.unflatten(1, (-1, 2)).transpose(1, 2)


def _stored(weight: Tensor, bias: Tensor | None) -> Product:
    """weight: a view [E, n, N / n, K]."""
    packed = pack_mxfp4(weight)
    if packed is None:
        return Product(weight.flatten(1, 2).contiguous(), None, bias)
    blocks, scales = packed
    return Product(blocks.flatten(1, 2), pad_scales(scales.flatten(1, 2)), bias)


def _agree(module: Any, fused: FusedExperts) -> bool:
    """Whether both compute the same of random rows, of which some are small and some reach far beyond a limit."""
    weights = fused.weights
    weight, _ = weights.gate_up.of(0, torch.float32)
    device, dtype = weights.down.weight.device, module.down_proj.dtype
    generator = torch.Generator().manual_seed(0)  # the caller's random state stays as it is
    spread = torch.tensor([0.3, 2.0, 16.0]).repeat(TRIAL_ROWS // 3)[:, None]  # of what the gates and ups will be
    hidden = torch.randn(TRIAL_ROWS, weight.shape[1], generator=generator) * spread
    hidden = (hidden / max(float(weight.norm(dim=1).mean()), 1e-6)).to(device, dtype)
    scores = torch.rand(TRIAL_ROWS, weights.num_experts, generator=generator)
    routing, indices = scores.topk(min(TRIAL_EXPERTS, weights.num_experts), dim=-1)
    indices, routing = indices.to(device), routing.softmax(dim=-1).to(device, dtype)
    try:
        expected = module(hidden, indices, routing).float()
    except TypeError:  # takes something else
        return False
    ours = fused(hidden, indices, routing).float()
    return bool(((ours - expected).norm(dim=1) <= TOLERANCE[dtype] * expected.norm(dim=1)).all())


@torch.no_grad()
def fuse_experts(module: nn.Module) -> int:
    """Replace the mixtures of experts below `module` that provably compute what `kernels.experts` does; returns how
    many. Calling it again changes nothing.

    Layout and constants are read off a module, and what it computes is tried on random rows, so that another activation
    under the same names is left alone. Replaced modules drop their weights one after the other: there is never more
    than one layer's twice.
    """
    # parents only: whoever held the mixtures would hold their weights
    places = [
        (parent, name)
        for parent in module.modules()
        for name, child in parent.named_children()
        if hasattr(child, "is_transposed") and not child._forward_hooks and not child._forward_pre_hooks
    ]
    count, is_cuda = 0, False
    for parent, name in places:
        child = getattr(parent, name)
        weights = read_experts(child)
        if weights is None:
            continue
        fused, kind = FusedExperts(weights).eval(), type(child).__name__
        is_cuda = is_cuda or weights.down.weight.is_cuda
        if _agree(child, fused):
            setattr(parent, name, fused)
            count += 1
        else:
            log.warning("%s: %s computes something else than its layout promises and is left as it is", name, kind)
        del child, weights, fused
    if is_cuda:
        torch.cuda.empty_cache()  # what the former weights lay in is not free to others before
    return count
