"""The drafter's layers as `fused_layer` runs them: `Drafter.forward`, over the paged cache that it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.kernels.fused_layer import LayerWeights, chain_for, layer_products, rope_rows, run_layer, tune_layers
from peagle.kernels.rms_norm import fuse_rms_norms
from peagle.kernels.rotary_table import RotaryTable, can_tabulate
from peagle.target.paged_attention import KVCache, PagedBatch


def _weights(layer: Any, drafter: Drafter, window: int | None) -> LayerWeights:
    config, attention, mlp = drafter.config, layer.self_attn, layer.mlp
    return LayerWeights(
        *layer_products(attention, mlp),
        post_norm=layer.post_attention_layernorm.weight,
        q_norm=None,
        k_norm=None,
        eps=config.rms_norm_eps,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5,
        sliding_window=window,
        norm=None if drafter.fc.weight.is_cuda else layer.post_attention_layernorm,
    )


class FusedDrafter:
    """A drafter's layers with their weights joined, for positions below `length`. The drafter's own linears become
    views of them, where `prepare_drafter` has not made parts of a product of them already. window: of its attention,
    None for all positions."""

    @torch.no_grad()
    def __init__(self, drafter: Drafter, length: int, window: int | None = None) -> None:
        fuse_rms_norms(drafter)
        self.drafter = drafter
        self.rotary: Any = drafter.rotary
        if can_tabulate(drafter.rotary):
            self.rotary = RotaryTable(drafter.rotary, length, drafter.fc.weight)
        self.layers: list[Any] = list(drafter.layers)
        self.weights = [_weights(layer, drafter, window) for layer in self.layers]
        tune_layers(self.weights)

    def __call__(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, kv_cache: KVCache, batch: PagedBatch
    ) -> tuple[Tensor, Tensor]:
        """As `Drafter.forward`: embeds, hidden [T, H], positions [T] -> (normed, feedback) [T, H]."""
        drafter = self.drafter
        cos, sin = self.rotary(hidden, positions[None])
        cos, sin = rope_rows(cos[0], sin[0])
        first, chain = self.layers[0], chain_for(hidden, self.weights[-1])
        normed = first.hidden_norm(hidden)
        residual = normed if first.norm_before_residual else hidden
        x = torch.cat((first.input_layernorm(embeds), normed), dim=-1)
        # behind each layer stands a norm: the next one's, or the last
        norms = [*(layer.input_layernorm for layer in self.layers[1:]), drafter.norm]
        for weights, cache, norm in zip(self.weights, kv_cache, norms, strict=True):
            if chain is None:
                hidden = run_layer(x, residual, weights, cos, sin, cache, batch)
                x = norm(hidden)
            else:
                from peagle.kernels.chained_layer import run_layer_chained

                hidden, x = run_layer_chained(x, residual, weights, cos, sin, cache, batch, norm.weight, chain)
            residual = hidden
        return x, x if drafter.config.norm_output else hidden
