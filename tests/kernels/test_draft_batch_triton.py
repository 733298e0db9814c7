"""The draft batch's Triton kernels against their PyTorch form: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peagle.kernels.draft_batch import DraftBatch, copy_hidden_states, expand_draft_batch
from tests.kernels.test_draft_batch import Case, cases, run

pytest.importorskip("triton")
from peagle.kernels.draft_batch_triton import (
    copy_hidden_states_triton,
    expand_draft_batch_triton,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EXAMPLES = 300 if CUDA else 60


def expand_here(*args: object) -> DraftBatch:
    moved = [arg.to(DEVICE) if isinstance(arg, torch.Tensor) else arg for arg in args]
    return expand_draft_batch_triton(*moved)  # type: ignore[arg-type]


def check_expansion(case: Case) -> None:
    expected, ours = run(case, expand_draft_batch), run(case, expand_here)
    for field in fields(DraftBatch):
        a, b = getattr(ours, field.name).cpu(), getattr(expected, field.name)
        assert a.dtype == b.dtype, field.name
        assert torch.equal(a, b), field.name


def check_hidden(seed: int, width: int, rows: int, out_rows: int, mask: bool, dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(seed)
    states, shared = torch.randn(rows, width, generator=g).to(dtype), torch.randn(width, generator=g).to(dtype)
    hidden_rows = torch.randint(0, rows, (out_rows,), generator=g)
    is_masked = torch.rand(out_rows, generator=g) < 0.5
    mask_state = shared if mask else None
    expected = copy_hidden_states(states, mask_state, hidden_rows, is_masked)
    moved = [None if x is None else x.to(DEVICE) for x in (states, mask_state, hidden_rows, is_masked)]
    assert torch.equal(copy_hidden_states_triton(*moved).cpu(), expected)  # type: ignore[arg-type]


hidden_arguments = (
    st.integers(0, 1000),
    st.sampled_from([1, 3, 32, 576, 1500]),
    st.integers(1, 20),
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(cases())
def test_expansion(case: Case) -> None:
    check_expansion(case)


@settings(max_examples=EXAMPLES, deadline=None)
@given(*hidden_arguments)
def test_hidden_states(seed: int, width: int, rows: int, out_rows: int, mask: bool, dtype: torch.dtype) -> None:
    check_hidden(seed, width, rows, out_rows, mask, dtype)


def many_requests() -> Case:
    """More requests than a program takes, and more rows."""
    n, g = 300, torch.Generator().manual_seed(0)
    rows = torch.randint(1, 6, (n,), generator=g).tolist()
    rejected = [r // 2 for r in rows]
    return Case(
        rows,
        torch.randint(0, 40, (n,), generator=g).tolist(),
        rejected,
        torch.randint(0, 8, (n,), generator=g).tolist(),
        (torch.rand(n, generator=g) < 0.8).tolist(),
        7,
        16,
        torch.randint(0, 900, (sum(rows),), generator=g),
        torch.randint(0, 900, (n,), generator=g),
        torch.randperm(n * 5, generator=g).view(n, 5).int(),
    )


def test_many_requests() -> None:
    check_expansion(many_requests())


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_one_launch() -> None:
    """The whole expansion is one kernel launch, and so is the copy of hidden states."""
    case = many_requests()
    run(case, expand_here)
    args = [
        torch.randn(8, 64, device="cuda"),
        torch.randn(64, device="cuda"),
        torch.zeros(30, dtype=torch.int64, device="cuda"),
        torch.zeros(30, dtype=torch.bool, device="cuda"),
    ]
    copy_hidden_states_triton(*args)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run(case, expand_here)
        copy_hidden_states_triton(*args)
        torch.cuda.synchronize()
    on_device = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [e.name for e in on_device if not e.name.startswith(("Memcpy", "Memset"))]
    assert sorted(kernels) == ["_copy_hidden_kernel", "_expand_kernel"]
