"""A decoder layer over few rows whose kernels are launched early: the memory reads weights while the small ones run.

Against `fused_layer.run_layer`, which stays the form of everything else: every product is our own kernel
(`skinny_linear`), which has its first weights fetched into the L2 cache before it waits for its input (`early_launch`);
sums over parts of a product's depth are made by the kernel that reads them, RoPE's or a norm's, so splitting the depth
costs no launch; and the last sum of a layer also makes the norm that the next one begins with.

Whether that is faster, and with which configurations, depends on the shape: `chain_tuning` measures it at load.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from peagle.kernels.fused_layer import LayerWeights, Weight
from peagle.kernels.fused_layer_triton import add_rms_norm_triton, rope_and_write_triton
from peagle.kernels.paged_attention import paged_attention_triton
from peagle.kernels.skinny_linear import MAX_ROWS, Config, Mode, skinny
from peagle.target.paged_attention import PagedBatch

# What a product takes that `Chain.configs` does not list: near what is best in each of a Llama-8B's products.
DEFAULTS: dict[Mode, Config] = {
    "plain": Config(64, 128, 6, 2, True, 1 << 14),
    "gated": Config(64, 64, 5, 1, True, 1 << 14),
}
# (layer's qkv, o, gate_up): what tells the shapes of models apart
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Chain:
    """How chained layers run.

    configs: (mode, weight rows, weight columns) -> a product's configuration. is_early: launch early (a GPU of compute
    capability 9.0 or later). defaults: what other products take.
    """

    configs: Mapping[tuple[Mode, int, int], Config] = field(default_factory=dict)
    is_early: bool = True
    defaults: Mapping[Mode, Config] = field(default_factory=DEFAULTS.copy)

    def config(self, mode: Mode, weight: Tensor) -> Config:
        return self.configs.get((mode, *weight.shape), self.defaults[mode])

    def product(
        self,
        mode: Mode,
        x: Tensor,
        weight: Weight,
        bias: Tensor | None = None,
        following: Weight | None = None,
        in_parts: bool = False,
    ) -> Tensor:
        """As `skinny`: [M, N] in x's dtype, or [S, M, N] float32 where the configuration splits the depth, or with
        `in_parts`, where there may be one part."""
        assert isinstance(weight, Tensor)  # on a GPU all are
        assert not isinstance(following, nn.Module)
        config = self.config(mode, weight)
        width = len(weight) // 2 if mode == "gated" else len(weight)
        if config.splits == 1 and not in_parts:
            out = x.new_empty(len(x), width)
        else:
            out = torch.empty((config.splits, len(x), width), dtype=torch.float32, device=x.device)
        return skinny(mode, x, weight, bias, out, config, self.is_early, following)


# What `chain_tuning` has found to be the fastest; None: layers of these shapes run unchained
fastest_chains: dict[Shapes, Chain | None] = {}
_chain: Chain | Literal["tuned"] | None = "tuned"


def use_chain(chain: Chain | Literal["tuned"] | None) -> None:
    """From now on let all layers over few rows run so, whatever their shapes (None: unchained), or as was found to be
    the fastest ("tuned", as it is at first). Steps already recorded stay as they are."""
    global _chain
    _chain = chain


def chain_for(x: Tensor, last: LayerWeights) -> Chain | None:
    """What layers with these shapes run with, if rows x [T, H] are few and of a dtype that the kernels are made for.

    last: the weights of the last layer, since a drafter's first is wider.
    """
    if len(x) > MAX_ROWS or x.element_size() != 2 or torch.cuda.get_device_capability(x.device) < (9, 0):
        return None
    return fastest_chains.get(shapes_of(last)) if _chain == "tuned" else _chain


def shapes_of(weights: LayerWeights) -> Shapes:
    return tuple(tuple(w.shape) for w in (weights.qkv, weights.o, weights.gate_up) if isinstance(w, Tensor))


def run_layer_chained(
    x: Tensor,
    residual: Tensor,
    weights: LayerWeights,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: PagedBatch,
    next_norm: Tensor,
    chain: Chain,
) -> tuple[Tensor, Tensor]:
    """As `run_layer`, at most MAX_ROWS rows: the layer's output [T, H], and its RMS norm with the weight next_norm."""
    early = chain.is_early
    qkv = chain.product("plain", x, weights.qkv, weights.qkv_bias)
    q = rope_and_write_triton(qkv, cos, sin, weights, cache, batch.slot_mapping, early)
    out = paged_attention_triton(q, *cache, batch, weights.scale, weights.sliding_window, is_chained=early)
    return finish_layer_chained(out.view(len(out), -1), residual, weights, next_norm, chain)


def finish_layer_chained(
    attended: Tensor, residual: Tensor, weights: LayerWeights, next_norm: Tensor, chain: Chain
) -> tuple[Tensor, Tensor]:
    """What stands behind attention, whose output is attended [T, Hq * D]."""
    early = chain.is_early
    # attention takes longer than reading the weight that is to follow it
    out = chain.product("plain", attended, weights.o, weights.o_bias, weights.gate_up)
    # Rounded where unchained layers round, so that how many rows a step has changes as few numbers as can be:
    # attention's product before it is added, the MLP's only with the sum.
    hidden, normed = add_rms_norm_triton(out, residual, weights.post_norm, weights.eps, early, rounds_parts=True)
    out = chain.product("plain", chain.product("gated", normed, weights.gate_up), weights.down, in_parts=True)
    return add_rms_norm_triton(out, hidden, next_norm, weights.eps, early)
