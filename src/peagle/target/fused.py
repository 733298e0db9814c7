"""The decoder of a Llama-like target as `fused_layer` runs it over a paged cache, in place of Transformers' own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.fused_layer import (
    LayerWeights,
    chain_for,
    layer_products,
    rope_rows,
    run_layer,
    tune_layers,
)
from peagle.kernels.joined_linear import JoinedPart, join_children
from peagle.kernels.rotary_table import RotaryTable, can_tabulate
from peagle.target.model import Target
from peagle.target.paged_attention import KVCache, PagedBatch

# Families whose layer is: norm, attention with RoPE (Qwen3: q and k normed before), residual, norm, SwiGLU, residual.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
QKV, GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")


class FusedDecoder:
    """All layers of a target, from token ids to what the LM head reads: `Target.forward_paged` calls it."""

    def __init__(self, target: Target) -> None:
        decoder: Any = target.decoder
        self.embed_weight, self.rotary = target.embed_weight, decoder.rotary_emb
        # before each layer, and the last
        self.norms: list[Any] = [*(layer.input_layernorm for layer in decoder.layers), decoder.norm]
        self.layers = [layer_weights(layer) for layer in decoder.layers]
        tune_layers(self.layers)

    def __call__(
        self, token_ids: Tensor, positions: Tensor, batch: PagedBatch, caches: KVCache, aux_layer_ids: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """T rows -> the normed output [T, H], and the inputs of the layers `aux_layer_ids` side by side [T, 3H]."""
        hidden = nn.functional.embedding(token_ids, self.embed_weight)
        cos, sin = self.rotary(hidden, positions[None])
        cos, sin = rope_rows(cos[0], sin[0])
        inputs: dict[int, Tensor] = {}
        chain, x = chain_for(hidden, self.layers[-1]), self.norms[0](hidden)
        for i, (weights, norm) in enumerate(zip(self.layers, self.norms[1:], strict=True)):
            if i in aux_layer_ids:
                inputs[i] = hidden
            if chain is None:
                hidden = run_layer(x, hidden, weights, cos, sin, caches[i], batch)
                x = norm(hidden)
            else:
                from peagle.kernels.chained_layer import run_layer_chained

                hidden, x = run_layer_chained(x, hidden, weights, cos, sin, caches[i], batch, norm.weight, chain)
        aux = torch.cat([inputs[i] for i in aux_layer_ids], dim=-1) if aux_layer_ids else None
        return x, aux


def layer_weights(layer: Any) -> LayerWeights:
    """What `run_layer` needs of a layer of Transformers. Weights are joined, not copied."""
    attention, mlp = layer.self_attn, layer.mlp
    post_norm, q_norm = layer.post_attention_layernorm, getattr(attention, "q_norm", None)
    head_dim = int(attention.head_dim)
    return LayerWeights(
        *layer_products(attention, mlp),
        post_norm=post_norm.weight,
        q_norm=None if q_norm is None else q_norm.weight,
        k_norm=None if q_norm is None else attention.k_norm.weight,
        eps=norm_eps(post_norm),
        num_heads=attention.q_proj.out_features // head_dim,
        num_kv_heads=attention.k_proj.out_features // head_dim,
        head_dim=head_dim,
        scale=float(attention.scaling),
        # Qwen decides by layer, Mistral takes its config's, Llama knows none
        sliding_window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
        norm=None if post_norm.weight.is_cuda else post_norm,
    )


def norm_eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def can_fuse(target: Target) -> bool:
    """Whether the layers are what `fused_layer` computes, with linears as Transformers made them."""
    config = target.config
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", "") != "silu":
        return False
    if getattr(config, "mlp_bias", False):
        return False
    products = [m for layer in target.layers for name, m in layer.named_modules() if name.endswith("_proj")]
    return all(type(m) is nn.Linear for m in products) and len(products) == 7 * len(target.layers)


@torch.no_grad()
def join_layers(layers: Iterable[Any]) -> None:
    """Join the products of fp32 layers, a target's or a drafter's, for a CPU: before their weights are laid out."""
    for layer in layers:
        join_children(layer.self_attn, QKV)
        join_children(layer.mlp, GATE_UP)


def is_joined(layers: nn.ModuleList) -> bool:
    """Whether `join_layers` has joined the products of a model's layers."""
    attention = getattr(layers[0], "self_attn", None) if len(layers) else None
    return isinstance(getattr(attention, QKV[0], None), JoinedPart)


@torch.no_grad()
def fuse_decoder_layers(target: Target) -> int:
    """Let a target's layers run fused over a paged cache; returns how many. Calling it again changes nothing.

    Weights are joined, not copied: the layers' own linears become views, so that the model can be used as before. On a
    CPU, with what `join_layers` and a new layout have left, they are parts of a product.
    """
    if target.fused is not None or not (is_joined(target.layers) or can_fuse(target)):
        return 0
    rotary = getattr(target.decoder, "rotary_emb", None)
    if can_tabulate(rotary):
        target.decoder.rotary_emb = RotaryTable(rotary, target.max_model_len, target.embed_weight)
    target.fused = FusedDecoder(target)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # what the separate weights lay in is not free to others before
    return len(target.layers)
