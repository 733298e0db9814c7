"""The race in one pass against its PyTorch twin: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from peagle.engine.race import race_keys, race_rows
from peagle.kernels.argmax_rows import CHUNK
from peagle.kernels.race_rows import race_rows_triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("vocab", [7, CHUNK, 2 * CHUNK + 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_pytorch(vocab: int, dtype: torch.dtype) -> None:
    rows = 60
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3).to(dtype)
    logits[1] = float("-inf")
    logits[1, vocab // 2] = -3
    temperature = torch.linspace(0.2, 2, rows)
    keys = race_keys(torch.arange(rows) - 5, torch.arange(rows) * 1000)
    ours = race_rows_triton(logits.to(DEVICE), temperature.to(DEVICE), keys.to(DEVICE)).cpu()
    assert int((ours != race_rows(logits, temperature, keys)).sum()) <= 1  # the two round differently
    assert ours[1] == vocab // 2


def test_no_rows() -> None:
    empty = torch.zeros(0, device=DEVICE)
    assert race_rows_triton(torch.zeros(0, 9, device=DEVICE), empty, empty.int()).shape == (0,)
