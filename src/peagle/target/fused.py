"""The decoder layers of Llama-like targets as `fused_layer` runs them, in place of Transformers' own on a GPU."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor, nn

from peagle.kernels.fused_layer import LayerWeights, chain_for, join_linears, run_layer, tune_layers
from peagle.kernels.rotary_table import RotaryTable, can_tabulate
from peagle.target.model import Target
from peagle.target.paged_attention import KVCache, PagedBatch

# Families whose layer is: norm, attention with RoPE (Qwen3: q and k normed before), residual, norm, SwiGLU, residual.
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


class FusedForward:
    """`forward` of one decoder layer: fused over a paged cache, otherwise (training, dense passes) what it was."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.dense, self.index, self.input_norm = layer.forward, int(attention.layer_idx), layer.input_layernorm
        self.following: FusedForward | None = None
        self.handed: tuple[Tensor, Tensor] | None = None  # an input, and its norm, from the layer before
        qkv, bias = join_linears([attention.q_proj, attention.k_proj, attention.v_proj])
        gate_up, _ = join_linears([mlp.gate_proj, mlp.up_proj])
        post_norm, q_norm = layer.post_attention_layernorm, getattr(attention, "q_norm", None)
        head_dim = int(attention.head_dim)
        self.weights = LayerWeights(
            qkv=qkv,
            qkv_bias=bias,
            o=attention.o_proj.weight,
            o_bias=attention.o_proj.bias,
            gate_up=gate_up,
            down=mlp.down_proj.weight,
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
        )

    def __call__(
        self,
        hidden_states: Tensor,
        *args: Any,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        paged: tuple[PagedBatch, KVCache] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if paged is None:
            return self.dense(hidden_states, *args, position_embeddings=position_embeddings, **kwargs)
        assert position_embeddings is not None
        batch, caches = paged
        cos, sin = position_embeddings
        handed, self.handed = self.handed, None
        x = handed[1] if handed is not None and handed[0] is hidden_states else self.input_norm(hidden_states[0])
        layer = (x, hidden_states[0], self.weights, cos[0], sin[0], caches[self.index], batch)
        chain = chain_for(x)
        if chain is None:
            return run_layer(*layer)[None]
        from peagle.kernels.chained_layer import run_layer_chained

        following = self.following
        # nobody asks the last layer for a norm; any weight will do
        next_norm = self.weights.post_norm if following is None else following.input_norm.weight
        hidden, normed = run_layer_chained(*layer, next_norm, chain)
        hidden = hidden[None]
        if following is not None:
            following.handed = hidden, normed
        return hidden


def norm_eps(norm: nn.Module) -> float:
    return float(getattr(norm, "variance_epsilon", getattr(norm, "eps", 0.0)))


def can_fuse(target: Target) -> bool:
    """Whether the layers are what `fused_layer` computes."""
    config = target.config
    if config.model_type not in FAMILIES or getattr(config, "hidden_act", "") != "silu":
        return False
    if getattr(config, "mlp_bias", False):
        return False
    products = [m for layer in target.layers for name, m in layer.named_modules() if name.endswith("_proj")]
    return all(type(m) is nn.Linear for m in products) and len(products) == 7 * len(target.layers)


@torch.no_grad()
def fuse_decoder_layers(target: Target) -> int:
    """Let a target's layers run fused over a paged cache; returns how many. Calling it again changes nothing.

    Weights are joined, not copied: the layers' own linears become views.
    """
    if not can_fuse(target):
        return 0
    fused = []
    for layer in target.layers:
        if not isinstance(layer.forward, FusedForward):
            layer.forward = FusedForward(layer)
            fused.append(layer.forward.weights)
    forwards: list[Any] = [layer.forward for layer in target.layers]
    for forward, following in itertools.pairwise(forwards):
        forward.following = following
    tune_layers(fused)
    rotary = getattr(target.decoder, "rotary_emb", None)
    if can_tabulate(rotary):
        target.decoder.rotary_emb = RotaryTable(rotary, target.max_model_len, target.embed_weight)
    if target.device.type == "cuda":
        torch.cuda.empty_cache()  # what the separate weights lay in is not free to others before
    return len(fused)
