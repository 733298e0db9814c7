"""The Triton loss against its plain twin: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

pytest.importorskip("triton")

from peagle.kernels import soft_loss
from peagle.training.losses import soft_slice

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
def test_kernel_equals_plain(dtype: torch.dtype, reduced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_loss, "BLOCK", 64)  # several blocks a row, the last one not full
    torch.manual_seed(0)
    rows, positions, vocab = 9, 4, 150
    ids = torch.randperm(vocab)[:90].sort().values.to(DEVICE) if reduced else None
    logits = (3 * torch.randn(rows, 90 if reduced else vocab)).to(DEVICE, dtype)
    teacher = (3 * torch.randn(positions, vocab)).to(DEVICE, dtype)
    teacher[1, :100] = -torch.inf  # ruled out, whole blocks of it
    index = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3, 3], device=DEVICE)
    weight = torch.rand(rows, device=DEVICE)
    weight[-1] = 0.0
    expected = soft_slice(logits, teacher, index, weight, ids)
    found = soft_loss.soft_slice_triton(logits.clone(), teacher, index, weight, ids)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert torch.allclose(found[0], expected[0], rtol=tolerance, atol=tolerance)
    assert torch.allclose(found[1].float(), expected[1].float(), rtol=tolerance, atol=1e-3 * tolerance)
    assert torch.equal(found[2], expected[2])
