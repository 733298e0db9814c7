"""A Llama-like decoder layer in nine launches: what target and drafter run, on a GPU and on a CPU in float32.

A decoding step is bound by reading weights, and the rest of it by starting kernels: Transformers' layer starts about
thirty, most of them over a few rows. Here q, k and v are one product, gate and up another; RoPE (with Qwen3's norms of
q and k before it) and the write to the KV cache are one kernel, as are the sum with the residual and the norm behind
it. Each Triton kernel (`fused_layer_triton`) has its PyTorch twin here, which is what the CPU runs: there a call costs
as much as its arithmetic, so that they are written with as few as possible.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peagle.kernels.joined_linear import JoinedPart
from peagle.target.paged_attention import PagedBatch, attend_written, write_kv

if TYPE_CHECKING:
    from peagle.kernels.chained_layer import Chain

TUNED_LAYERS = 8  # so many layers' weights do not fit into a cache

Weight = Tensor | nn.Module  # of a product: the matrix, or what computes it


@dataclass(slots=True)
class LayerWeights:
    """One layer. qkv [(Hq + 2 Hkv) * D, H_in] with its bias or None; o [H, Hq * D] with its bias or None; gate_up
    [2 I, H]; down [H, I]; post_norm [H]; q_norm, k_norm [D] or None. eps: of all norms. On a CPU the first four may be
    modules with weights in a layout of their own, and their biases."""

    qkv: Weight
    qkv_bias: Tensor | None
    o: Weight
    o_bias: Tensor | None
    gate_up: Weight
    down: Weight
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    norm: Callable[[Tensor], Tensor] | None = None  # post_norm as a CPU computes it


def one_product(linears: list[nn.Module]) -> tuple[Weight, Tensor | None]:
    """Weight and bias of linears over the same input as one: `join_linears`, or what `join_children` has joined."""
    if isinstance(linears[0], JoinedPart):
        return linears[0].whole.linear, None
    return join_linears(linears)  # type: ignore[arg-type]


def weight_and_bias(linear: nn.Module) -> tuple[Weight, Tensor | None]:
    """A single linear's; one of another class, which may have its own layout, is kept as a whole."""
    return (linear.weight, linear.bias) if type(linear) is nn.Linear else (linear, None)


def layer_products(attention: Any, mlp: Any) -> tuple[Weight, Tensor | None, Weight, Tensor | None, Weight, Weight]:
    """The first six of a layer's `LayerWeights`, from modules named as Transformers names them."""
    qkv, qkv_bias = one_product([attention.q_proj, attention.k_proj, attention.v_proj])
    o, o_bias = weight_and_bias(attention.o_proj)
    gate_up, _ = one_product([mlp.gate_proj, mlp.up_proj])
    down, _ = weight_and_bias(mlp.down_proj)
    return qkv, qkv_bias, o, o_bias, gate_up, down


def join_linears(linears: list[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Weights and biases of linears over the same input as one; theirs become views of it, so that nothing is stored
    twice and they can be used as before."""
    sizes = [linear.out_features for linear in linears]
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if linears[0].bias is not None:
        bias = torch.cat([linear.bias.detach() for linear in linears])
    for i, (linear, part) in enumerate(zip(linears, weight.split(sizes), strict=True)):
        linear.weight = nn.Parameter(part, requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias.split(sizes)[i], requires_grad=False)
    return weight, bias


def run_layer(
    x: Tensor,
    residual: Tensor,
    weights: LayerWeights,
    cos: Tensor,
    sin: Tensor,
    cache: tuple[Tensor, Tensor],
    batch: PagedBatch,
) -> Tensor:
    """Attention of x [T, H_in] (normed) over the cache, which gets its keys and values, then the MLP: the layer's
    output [T, H]. residual [T, H] is left as it is; cos and sin: of `rope_rows`."""
    qkv = linear(x, weights.qkv, weights.qkv_bias)
    q = rope_and_write(qkv, cos, sin, weights, cache, batch)
    out = attend_written(q, cache, batch, weights.scale, weights.sliding_window)
    return finish_layer(out.reshape(len(out), -1), residual, weights)


def finish_layer(attended: Tensor, residual: Tensor, weights: LayerWeights) -> Tensor:
    """What stands behind attention, whose output is attended [T, Hq * D]: the layer's output [T, H]."""
    out = linear(attended, weights.o, weights.o_bias)
    if weights.norm is not None:
        hidden = out.add_(residual)
        normed = weights.norm(hidden)
    else:
        hidden, normed = add_rms_norm(out, residual, weights.post_norm, weights.eps)
    return add_linear_(hidden, silu_linear(normed, weights.gate_up), weights.down)


def chain_for(x: Tensor, last: LayerWeights) -> Chain | None:
    """How layers, with the weights `last` in the last one, run chained over the rows x [T, H], if they do
    (`chained_layer.run_layer_chained`)."""
    if not x.is_cuda:
        return None
    from peagle.kernels import chained_layer

    return chained_layer.chain_for(x, last)


def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias."""
    if not isinstance(weight, Tensor):
        return weight(x)
    if x.is_cuda:
        from peagle.kernels.skinny_linear import fastest, skinny

        if (config := fastest("plain", x, weight)) is not None:
            return skinny("plain", x, weight, bias, x.new_empty(len(x), len(weight)), config)
    return F.linear(x, weight, bias)


def silu_linear(x: Tensor, gate_up: Weight) -> Tensor:
    """silu(x @ gate.T) * (x @ up.T) for gate and up joined to [2 I, K]: [T, I]."""
    if not isinstance(gate_up, Tensor):
        return silu_and_mul(gate_up(x))
    if x.is_cuda:
        from peagle.kernels.skinny_linear import fastest, skinny

        if (config := fastest("gated", x, gate_up)) is not None:
            return skinny("gated", x, gate_up, None, x.new_empty(len(x), len(gate_up) // 2), config)
    return silu_and_mul(F.linear(x, gate_up))


def add_linear_(total: Tensor, x: Tensor, weight: Weight) -> Tensor:
    """total [T, N] += x [T, K] @ weight [N, K].T, in place."""
    if not isinstance(weight, Tensor):
        return total.add_(weight(x))
    if x.is_cuda:
        from peagle.kernels.skinny_linear import fastest, skinny

        if (config := fastest("added", x, weight)) is not None:
            return skinny("added", x, weight, None, total, config)
    return total.addmm_(x, weight.t())


def tune_layers(layers: Sequence[LayerWeights]) -> None:
    """On a GPU measure which form of each product is the fastest for few rows, and whether a chain is faster still."""
    some = layers[:TUNED_LAYERS]
    if not some or not some[0].post_norm.is_cuda or some[0].post_norm.dtype.itemsize != 2:
        return
    from peagle.kernels.skinny_linear import tune

    qkv, o, gate_up, down = (
        [weight for layer in some if isinstance(weight := getattr(layer, name), Tensor)]
        for name in ("qkv", "o", "gate_up", "down")
    )
    for shape in {weight.shape for weight in qkv}:  # a drafter's first layer is wider
        tune("plain", [weight for weight in qkv if weight.shape == shape], F.linear)
    tune("plain", o, F.linear)
    tune("gated", gate_up, lambda x, weight: silu_and_mul(F.linear(x, weight)))
    total = torch.zeros(8, len(down[0]), dtype=down[0].dtype, device=down[0].device)
    tune("added", down, lambda x, weight: total.addmm_(x, weight.t()))
    if torch.cuda.get_device_capability(total.device) >= (9, 0):
        from peagle.kernels.chain_tuning import tune_chain

        tune_chain(layers)


def rope_rows(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, D] of a pass's rows as `run_layer` reads them: on a CPU signed and with room for heads,
    [T, 1, D], so that no layer has to do that again."""
    if cos.is_cuda:
        return cos, sin
    first, second = sin.float().chunk(2, dim=-1)
    return cos.float()[:, None], torch.cat((-first, second), dim=-1)[:, None]


def rope_and_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: LayerWeights, cache: tuple[Tensor, Tensor], batch: PagedBatch
) -> Tensor:
    """qkv [T, (Hq + 2 Hkv) * D] -> q [T, Hq, D], normed and rotated; keys (likewise) and values go to their slots.

    cos, sin: as `rope_rows` gives them. q may share qkv's memory.
    """
    if qkv.is_cuda:
        from peagle.kernels.fused_layer_triton import rope_and_write_triton

        return rope_and_write_triton(qkv, cos, sin, weights, cache, batch.slot_mapping)
    return _rope_and_write(qkv, cos, sin, weights, cache, batch.slot_mapping, batch.all_write)


def rope_and_write_torch(
    qkv: Tensor, cos: Tensor, sin: Tensor, weights: LayerWeights, cache: tuple[Tensor, Tensor], slot_mapping: Tensor
) -> Tensor:
    """What the Triton kernel computes, from cos and sin [T, D]."""
    return _rope_and_write(qkv, *rope_rows(cos, sin), weights, cache, slot_mapping, False)


def _rope_and_write(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    all_write: bool,
) -> Tensor:
    num_heads, rotating = weights.num_heads, weights.num_heads + weights.num_kv_heads
    heads = qkv.view(len(qkv), -1, weights.head_dim)
    x = heads[:, :rotating].float()
    if weights.q_norm is not None and weights.k_norm is not None:
        q = F.rms_norm(x[:, :num_heads], (weights.head_dim,), weights.q_norm.float(), weights.eps)
        k = F.rms_norm(x[:, num_heads:], (weights.head_dim,), weights.k_norm.float(), weights.eps)
        x = torch.cat((q, k), dim=1)
    # Llama's half-split convention; the sign of the half that moves up is in sin
    x = (x * cos).addcmul_(x.roll(weights.head_dim // 2, -1), sin).to(qkv.dtype)
    write_kv(x[:, num_heads:], heads[:, rotating:], *cache, slot_mapping, all_write)
    return x[:, :num_heads]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x + residual and its RMS norm, both [T, H]."""
    if x.is_cuda:
        from peagle.kernels.fused_layer_triton import add_rms_norm_triton

        return add_rms_norm_triton(x, residual, weight, eps)
    return add_rms_norm_torch(x, residual, weight, eps)


def add_rms_norm_torch(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return total, F.rms_norm(total, weight.shape, weight, eps)


def silu_and_mul(x: Tensor) -> Tensor:
    """[T, 2 I] -> silu(first half) * second half, [T, I]."""
    if x.is_cuda:
        from peagle.kernels.fused_layer_triton import silu_and_mul_triton

        return silu_and_mul_triton(x)
    return silu_and_mul_torch(x)


def silu_and_mul_torch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate.float()).mul_(up).to(x.dtype)
