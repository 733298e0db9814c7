"""The benchmark of a mixture of experts gives all its forms the same weights and calls that read what they say."""

from __future__ import annotations

import pytest
import torch

from peagle.kernels.experts import experts_torch
from peagle.target.fused_experts import read_experts
from tests.load_benchmark import load

pytest.importorskip("triton")
experts = load("experts")


def test_all_forms_hold_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "HIDDEN", 64)
    module = experts.make_module(torch.device("cpu"))
    packed, plain = read_experts(module), experts.in_bf16(module)
    assert packed is not None
    assert packed.gate_up.scales is not None
    assert packed.down.scales is not None
    for call in experts.make_calls(3, torch.device("cpu"))[:2]:
        expected = experts_torch(*call, plain)
        assert torch.equal(experts_torch(*call, packed), expected)
        torch.testing.assert_close(module(*call), expected, rtol=5e-2, atol=2e-3)
    assert experts.expert_bytes(plain) == 2 * 3 * 64 * 64
    assert experts.expert_bytes(packed) == 3 * 64 * 32 + 3 * 64 * 16  # scales are padded to 16


def test_single_rows_share_no_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "HIDDEN", 64)
    calls = experts.make_calls(1, torch.device("cpu"))
    assert len(torch.cat([indices.flatten() for _, indices, _ in calls]).unique()) == 32
    assert experts.touched(calls) == 4


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("is_down", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_tiles_to_try(packed: bool, is_down: bool, rows: int) -> None:
    tiles = experts.tiles(packed, is_down, rows)
    assert tiles
    assert all(tile.depth % (128 if packed else 16) == 0 for tile in tiles)
    assert all(tile.splits == 1 or (is_down and rows == 16) for tile in tiles)
