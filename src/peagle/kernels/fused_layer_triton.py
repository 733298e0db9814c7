"""Triton kernels of a decoder layer. Their specification is the PyTorch form in `peagle.kernels.fused_layer`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch
from peagle.target.paged_attention import FP8

if TYPE_CHECKING:
    from peagle.kernels.fused_layer import LayerWeights

HEADS_AT_ONCE = 8


@triton.jit
def _rope_and_write_kernel(
    q_ptr, qkv_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, k_cache_ptr, v_cache_ptr, slot_ptr,
    q_stride, qkv_stride, part_stride, cos_stride, sin_stride, eps,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    HEADS: tl.constexpr, HAS_NORM: tl.constexpr, IS_FP8: tl.constexpr, PARTS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, HALF_PAD)
    in_dim = d < HALF
    slot = tl.load(slot_ptr + row).to(tl.int64)  # here, so that nobody waits for it later
    is_q, is_v = head < NUM_HEADS, head >= NUM_HEADS + NUM_KV_HEADS
    inside = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_dim[None]
    offset = head[:, None] * (2 * HALF) + d[None]
    source = qkv_ptr + row * qkv_stride + offset
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        first += tl.load(source + part * part_stride, mask=inside, other=0.0)
        second += tl.load(source + part * part_stride + HALF, mask=inside, other=0.0)
    # rounded where one product would be
    first = first.to(q_ptr.dtype.element_ty).to(tl.float32)
    second = second.to(q_ptr.dtype.element_ty).to(tl.float32)
    a, b = first, second
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(a * a, 1) + tl.sum(b * b, 1)) / (2 * HALF) + eps)[:, None]
        q1 = tl.load(q_norm_ptr + d, mask=in_dim, other=0.0).to(tl.float32)[None]
        q2 = tl.load(q_norm_ptr + HALF + d, mask=in_dim, other=0.0).to(tl.float32)[None]
        k1 = tl.load(k_norm_ptr + d, mask=in_dim, other=0.0).to(tl.float32)[None]
        k2 = tl.load(k_norm_ptr + HALF + d, mask=in_dim, other=0.0).to(tl.float32)[None]
        a = a * scale * tl.where(is_q[:, None], q1, k1)
        b = b * scale * tl.where(is_q[:, None], q2, k2)
    cos1 = tl.load(cos_ptr + row * cos_stride + d, mask=in_dim, other=0.0).to(tl.float32)[None]
    cos2 = tl.load(cos_ptr + row * cos_stride + HALF + d, mask=in_dim, other=0.0).to(tl.float32)[None]
    sin1 = tl.load(sin_ptr + row * sin_stride + d, mask=in_dim, other=0.0).to(tl.float32)[None]
    sin2 = tl.load(sin_ptr + row * sin_stride + HALF + d, mask=in_dim, other=0.0).to(tl.float32)[None]
    out1 = tl.where(is_v[:, None], first, a * cos1 - b * sin1)
    out2 = tl.where(is_v[:, None], second, b * cos2 + a * sin2)
    # q may go back to where it came from; nobody else reads these elements
    target = q_ptr + row * q_stride + offset
    tl.store(target, out1.to(q_ptr.dtype.element_ty), mask=inside & is_q[:, None])
    tl.store(target + HALF, out2.to(q_ptr.dtype.element_ty), mask=inside & is_q[:, None])
    if slot >= 0:
        # keys and values are rounded as the layer's dtype before the cache's
        kv1 = out1.to(q_ptr.dtype.element_ty).to(tl.float32)
        kv2 = out2.to(q_ptr.dtype.element_ty).to(tl.float32)
        if IS_FP8:
            kv1 = tl.minimum(tl.maximum(kv1, -448.0), 448.0)
            kv2 = tl.minimum(tl.maximum(kv2, -448.0), 448.0)
        is_k = (is_q | is_v) == 0
        base = slot * (NUM_KV_HEADS * 2 * HALF) + offset
        key = base - NUM_HEADS * 2 * HALF
        value = key - NUM_KV_HEADS * 2 * HALF
        tl.store(k_cache_ptr + key, kv1.to(k_cache_ptr.dtype.element_ty), mask=inside & is_k[:, None])
        tl.store(k_cache_ptr + key + HALF, kv2.to(k_cache_ptr.dtype.element_ty), mask=inside & is_k[:, None])
        tl.store(v_cache_ptr + value, kv1.to(v_cache_ptr.dtype.element_ty), mask=inside & is_v[:, None])
        tl.store(v_cache_ptr + value + HALF, kv2.to(v_cache_ptr.dtype.element_ty), mask=inside & is_v[:, None])


def rope_and_write_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: LayerWeights,
    cache: tuple[Tensor, Tensor],
    slot_mapping: Tensor,
    is_chained: bool = False,
) -> Tensor:
    """As `rope_and_write`, in one launch; q is rotated in place and returned as a view.

    qkv may also come as [S, T, (Hq + 2 Hkv) * D] float32, whose sum over S it is; then q is in cos' dtype.
    """
    (rows, width), dim = qkv.shape[-2:], weights.head_dim
    parts = len(qkv) if qkv.dim() == 3 else 1
    q = qkv if qkv.dim() == 2 else torch.empty((rows, weights.num_heads * dim), dtype=cos.dtype, device=qkv.device)
    heads = weights.num_heads + 2 * weights.num_kv_heads
    half = dim // 2
    has_norm = weights.q_norm is not None
    _rope_and_write_kernel[(rows, triton.cdiv(heads, HEADS_AT_ONCE))](
        q, qkv, cos, sin, weights.q_norm if has_norm else q, weights.k_norm if has_norm else q, *cache, slot_mapping,
        q.stride(0), qkv.stride(-2), rows * width, cos.stride(0), sin.stride(0), weights.eps,
        NUM_HEADS=weights.num_heads, NUM_KV_HEADS=weights.num_kv_heads, HALF=half,
        HALF_PAD=triton.next_power_of_2(half), HEADS=HEADS_AT_ONCE, HAS_NORM=has_norm, IS_FP8=cache[0].dtype is FP8,
        PARTS=parts, IS_CHAINED=is_chained, num_warps=2, **early_launch(is_chained),
    )  # fmt: skip
    return q[:, : weights.num_heads * dim].view(rows, weights.num_heads, dim)


@triton.jit
def _add_rms_norm_kernel(
    sum_ptr, out_ptr, x_ptr, residual_ptr, weight_ptr, x_stride, part_stride, residual_stride, eps,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, IS_CHAINED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, ROUNDS_PARTS: tl.constexpr,
):  # fmt: skip
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)  # no kernel writes it
    if IS_CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * part_stride + row * x_stride + column, mask=inside, other=0.0)
    if ROUNDS_PARTS:  # where one product would be
        x = x.to(sum_ptr.dtype.element_ty).to(tl.float32)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(sum_ptr.dtype.element_ty)  # the norm is that of the sum as it is kept
        tl.store(sum_ptr + row * WIDTH + column, x, mask=inside)
        x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    tl.store(out_ptr + row * WIDTH + column, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def add_rms_norm_triton(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, is_chained: bool = False, rounds_parts: bool = False
) -> tuple[Tensor, Tensor]:
    """As `add_rms_norm`, in one launch. x may also come as [S, T, H] float32, whose sum over S is added, rounded to the
    residual's dtype before if `rounds_parts`."""
    rows, width = residual.shape
    total, out = (torch.empty((rows, width), dtype=residual.dtype, device=x.device) for _ in range(2))
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(rows,)](
        total, out, x, residual, weight, x.stride(-2), rows * width, residual.stride(0), eps,
        WIDTH=width, BLOCK=block, PARTS=len(x) if x.dim() == 3 else 1, IS_CHAINED=is_chained,
        HAS_RESIDUAL=True, ROUNDS_PARTS=rounds_parts and x.dim() == 3,
        num_warps=min(16, max(1, block // (256 if is_chained else 512))), **early_launch(is_chained),
    )  # fmt: skip
    return total, out


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] normed by weight [H]."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    width = rows.shape[1]
    block = triton.next_power_of_2(width)
    _add_rms_norm_kernel[(len(rows),)](
        out, out, rows, rows, weight, rows.stride(0), 0, 0, eps, WIDTH=width, BLOCK=block, PARTS=1, IS_CHAINED=False,
        HAS_RESIDUAL=False, ROUNDS_PARTS=False, num_warps=min(16, max(1, block // 256)),
    )  # fmt: skip
    return out.view(x.shape)


@triton.jit
def _silu_and_mul_kernel(out_ptr, x_ptr, x_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * x_stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * WIDTH + column, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul_triton(x: Tensor) -> Tensor:
    """As `silu_and_mul`, in one launch."""
    rows, width = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(width))
    _silu_and_mul_kernel[(rows, triton.cdiv(width, block))](out, x, x.stride(0), WIDTH=width, BLOCK=block)
    return out
