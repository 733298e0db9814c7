"""Puts together what attention over parts of a request's keys gave: the second pass of split keys."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from peagle.kernels.early_launch import early_launch


@triton.jit(do_not_specialize=["num_cells"])
def _join_kernel(
    out_ptr, part_ptr, best_ptr, total_ptr, num_cells,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, NUM_SPLITS: tl.constexpr, IS_EARLY: tl.constexpr,
):  # fmt: skip
    # One program a row and head puts the splits of its keys together.
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    cell = tl.program_id(0)
    d = tl.arange(0, DIM)
    split = tl.arange(0, NUM_SPLITS)
    best = tl.load(best_ptr + split * num_cells + cell)
    weight = tl.exp(best - tl.max(best, 0))
    total = tl.sum(tl.load(total_ptr + split * num_cells + cell) * weight, 0)
    part = tl.load(
        part_ptr + (split[:, None].to(tl.int64) * num_cells + cell) * HEAD_DIM + d[None],
        mask=(d < HEAD_DIM)[None], other=0.0,
    )  # fmt: skip
    out = tl.sum(part * weight[:, None], 0) / total
    tl.store(out_ptr + cell.to(tl.int64) * HEAD_DIM + d, out.to(out_ptr.dtype.element_ty), mask=d < HEAD_DIM)


def join_splits(out: Tensor, part: Tensor, best: Tensor, total: Tensor, is_early: bool = False) -> None:
    """out [T, Hq, D] from part [S, T, Hq, D] (sums of weighted values), best and total [S, T, Hq] (each part's greatest
    score, in natural units, and its sum of exp(score - best)), all but out float32; S is a power of 2.

    is_early: the kernel that makes the parts lets this one be launched before it ends (programmatic dependent launch).
    """
    num_splits, rows, num_heads, head_dim = part.shape
    _join_kernel[(rows * num_heads,)](
        out, part, best, total, rows * num_heads,
        HEAD_DIM=head_dim, DIM=max(16, triton.next_power_of_2(head_dim)), NUM_SPLITS=num_splits, IS_EARLY=is_early,
        num_warps=2, **early_launch(is_early),
    )  # fmt: skip
