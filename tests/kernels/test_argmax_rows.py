"""The argmax of long rows against PyTorch's: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from peagle.kernels.argmax_rows import CHUNK, argmax_rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab", [7, CHUNK, 2 * CHUNK + 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_pytorch(vocab: int, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(vocab)
    x = torch.randn(5, vocab, generator=g).to(dtype)
    x[3] = float("-inf")
    x[3, vocab // 2] = -3
    x[4] = 1  # all equal: the first
    first = [(row == row.max()).nonzero()[0].item() for row in x.float()]
    assert argmax_rows_triton(x.to(DEVICE)).tolist() == first


@pytest.mark.parametrize("vocab", [7, CHUNK, 2 * CHUNK + 33])
def test_nan_leads_nowhere(vocab: int) -> None:
    x = torch.full((3, vocab), float("nan"))
    x[1, 2] = -1.0
    x[2, :-1] = float("-inf")
    assert argmax_rows_triton(x.to(DEVICE)).tolist() == [0, 2, 0]


def test_no_rows() -> None:
    assert argmax_rows_triton(torch.zeros(0, 9, device=DEVICE)).shape == (0,)
