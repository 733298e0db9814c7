"""Unpacking of `mxfp4` blocks within a Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

# Four bytes ($4) of a block, each with two numbers, and their scale as bfloat16s ($5, $6, two in each) become the
# bfloat16s of the low halves ($0, $1) and of the high ones ($2, $3). In a bfloat16 e2m1's sign is bit 15 and its other
# bits are 8 to 6, the lowest of the exponent and the highest of the fraction; what the exponent then lacks, 126, is in
# the scale, and denormals come out right because multiplying keeps them. prmt puts each byte twice into 16 bits, so
# that a shift brings every bit to its place. The product is a fused one with -0: that came with capability 8.0.
_UNPACK = tl.constexpr("""
{
    .reg .b32 t, a, b, zero, l0, l1, h0, h1;
    mov.b32 zero, 0x80008000;
    prmt.b32 t, $4, 0, 0x1100;
    shl.b32 a, t, 4;
    and.b32 a, a, 0x80008000;
    shl.b32 b, t, 6;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    fma.rn.bf16x2 l0, a, $5, zero;
    and.b32 a, t, 0x80008000;
    shl.b32 b, t, 2;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    fma.rn.bf16x2 h0, a, $5, zero;
    prmt.b32 t, $4, 0, 0x3322;
    shl.b32 a, t, 4;
    and.b32 a, a, 0x80008000;
    shl.b32 b, t, 6;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    fma.rn.bf16x2 l1, a, $6, zero;
    and.b32 a, t, 0x80008000;
    shl.b32 b, t, 2;
    and.b32 b, b, 0x01C001C0;
    or.b32 a, a, b;
    fma.rn.bf16x2 h1, a, $6, zero;
    mov.b32 $0, l0;
    mov.b32 $1, l1;
    mov.b32 $2, h0;
    mov.b32 $3, h1;
}
""")


@triton.jit
def unpack_in_ptx(packed, scale):
    """packed [..., 16] uint8 and scale [..., 1], integers within `mxfp4`'s limits -> the numbers in the low and in the
    high halves of the bytes, [..., 16] bfloat16 each."""
    # 2^(scale - 127), and 2^126 for the exponent's bias
    factor = ((scale.to(tl.int32) + 126) << 7).to(tl.int16)
    factor = tl.broadcast_to(factor, packed.shape)
    low, high = tl.inline_asm_elementwise(
        _UNPACK, "=r,=r,=r,=r,r,r,r", [packed, factor], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
    )
    return low, high


@triton.jit
def unpack_in_triton(packed, scale, dtype: tl.constexpr):
    """As `unpack_in_ptx`, for any device and dtype."""
    factor = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    low = (_number(packed & 15) * factor).to(dtype)
    high = (_number(packed >> 4) * factor).to(dtype)
    return low, high


@triton.jit
def _number(code):
    """e2m1 -> float32: a fraction with its leading bit, unless the exponent is 0, shifted by the exponent."""
    code = code.to(tl.int32)
    exponent = (code >> 1) & 3
    halves = ((code & 1) | (tl.minimum(exponent, 1) << 1)) << (tl.maximum(exponent, 1) - 1)
    magnitude = halves.to(tl.float32) * 0.5
    return tl.where(code >= 8, -magnitude, magnitude)
