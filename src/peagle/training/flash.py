"""FlashAttention 4 for the rule of attention over rows: its CuTe kernels (package flash-attn-4) take a mask as a
function of two indices and lists of the tiles that it touches.

Measured on Hopper, where it takes 0.7 of FlexAttention's time (docs/benchmarks.md).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HEAD_DIMS = (64, 128)  # 4.0.0b36's gradients under a mask are wrong with 16 and 80; others were not tried
CHAIN = 1 << 30  # codes of chain keys begin here, those of depth-0 keys end
DEPTHS = 128  # codes of one chain: int32 holds those of 8,388,607 anchors


@dataclass(frozen=True)
class FlashMask:
    """A mask over [Q, K] rows, both padded to whole tiles: `codes` for the tiles that are partly visible, and which
    tiles are visible at all, by row of tiles (forward) and by column (backward)."""

    codes: list[Tensor]
    forward: Any
    backward: Any


def flash_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention 4 cannot take a head's attention here; None where it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return "needs a Hopper GPU (compute capability 9.0)"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"computes in 16 bits, and the head in {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"is right with head_dim {' and '.join(map(str, HEAD_DIMS))}, and it is {head_dim}"
    try:
        found = importlib.util.find_spec("flash_attn.cute") is not None
    except ImportError:  # no flash_attn at all
        found = False
    return None if found else "needs the package flash-attn-4"


def query_codes(anchor: Tensor, first: Tensor, depth: Tensor) -> list[Tensor]:
    """int32 [Q] each: a row sees the keys with codes in [first, anchor] and in (chain, last]."""
    chain = CHAIN + anchor * DEPTHS
    return [first.int(), anchor.int(), chain.int(), (chain + depth.clamp(min=0)).int()]


def key_codes(anchor: Tensor, depth: Tensor) -> Tensor:
    """int32 [K]; of a filler one that no row sees."""
    return torch.where(depth > 0, CHAIN + anchor * DEPTHS + depth, torch.where(depth == 0, anchor, -1)).int()


def flash_mask(codes: list[Tensor], block_mask: Any) -> FlashMask:
    """From `query_codes` and `key_codes`, and FlexAttention's block mask of the same rows: the lists are the same."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    mask = block_mask
    forward = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    backward = (mask.q_num_blocks, mask.q_indices, mask.full_q_num_blocks, mask.full_q_indices)
    lists = [BlockSparseTensorsTorch(*tensors, block_size=tuple(mask.BLOCK_SIZE)) for tensors in (forward, backward)]
    return FlashMask(codes, *lists)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: FlashMask) -> Tensor:
    """q [Q, Hq, D], k and v [K, Hkv, D] in 16 bits -> [Q, Hq, D]."""
    from flash_attn.cute import flash_attn_func

    out, _ = flash_attn_func(
        q[None],
        k[None],
        v[None],
        pack_gqa=False,  # tiles are of rows, not of rows times heads
        mask_mod=_visible(),
        aux_tensors=mask.codes,
        block_sparse_tensors=mask.forward,
        block_sparse_tensors_bwd=mask.backward,
    )
    return out[0]


@functools.cache
def _visible() -> Callable[..., Any]:
    """The rule over codes, in the kernels' language."""
    import cutlass
    import cutlass.cute as cute
    from flash_attn.cute.utils import scalar_to_ssa

    @cute.jit
    def visible(batch, head, row, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        first = scalar_to_ssa(aux_tensors[0][row[0]], cutlass.Int32)
        anchor = scalar_to_ssa(aux_tensors[1][row[0]], cutlass.Int32)
        chain = scalar_to_ssa(aux_tensors[2][row[0]], cutlass.Int32)
        last = scalar_to_ssa(aux_tensors[3][row[0]], cutlass.Int32)
        code = scalar_to_ssa(aux_tensors[4][key[0]], cutlass.Int32)
        return ((code >= first) & (code <= anchor)) | ((code > chain) & (code <= last))

    return visible
