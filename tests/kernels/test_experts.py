"""Mixtures of experts against the specification: interpreted on the CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from peagle.kernels.expert_groups import MOST_IN_ONE_PROGRAM, Groups, group_pairs_torch, most_tiles
from peagle.kernels.experts import ExpertWeights, Product, activate, experts, experts_torch, pad_scales
from peagle.kernels.mxfp4 import unpack_mxfp4

pytest.importorskip("triton")
from peagle.kernels.expert_groups_triton import group_pairs_triton
from peagle.kernels.experts_triton import MXFP4, PLAIN, Config, Tile, choose_config, experts_triton

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# relative; the interpreter cuts bfloat16 off where a GPU rounds it, four times
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2 if CUDA else 3e-2}
GPT_OSS, SWIGLU = (1.702, 7.0), (1.0, None)


def choices(rows: int, k: int, num_experts: int, seed: int = 0) -> Tensor:
    """k different experts of each row."""
    g = torch.Generator().manual_seed(seed)
    return torch.rand(rows, num_experts, generator=g).topk(k, dim=-1).indices.to(DEVICE)


def make_product(shape: tuple[int, int, int], dtype: torch.dtype, packed: bool, has_bias: bool, seed: int) -> Product:
    g = torch.Generator().manual_seed(seed)
    bias = torch.randn(shape[:2], generator=g).to(DEVICE, dtype) if has_bias else None
    if not packed:
        weight = torch.randn(shape, generator=g) / shape[2] ** 0.5
        return Product(weight.to(DEVICE, dtype), None, bias)
    blocks = torch.randint(0, 256, (*shape[:2], shape[2] // 32, 16), generator=g, dtype=torch.uint8)
    scales = torch.randint(120, 125, blocks.shape[:-1], generator=g, dtype=torch.uint8)
    return Product(blocks.to(DEVICE), pad_scales(scales.to(DEVICE)), bias)


def make_weights(
    num_experts: int, hidden: int, inter: int, dtype: torch.dtype, packed: bool = False, bias: bool = True,
    kind: tuple[float, float | None] = GPT_OSS,
) -> ExpertWeights:  # fmt: skip
    gate_up = make_product((num_experts, 2 * inter, hidden), dtype, packed, bias, 1)
    return ExpertWeights(gate_up, make_product((num_experts, hidden, inter), dtype, packed, bias, 2), *kind)


def make_rows(rows: int, k: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states, some so large that gates and ups reach the limit, and routing weights."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(rows, hidden, generator=g) * (1 + 5 * (torch.arange(rows) % 2))[:, None]
    return x.to(DEVICE, dtype), torch.rand(rows, k, generator=g).to(DEVICE, dtype)


def assert_agrees(got: Tensor, expected: Tensor) -> None:
    error = (got.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[expected.dtype], error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("rows", "k"), [(1, 4), (2, 1), (5, 2), (33, 2), (70, 4)])
def test_equals_the_specification(rows: int, k: int, packed: bool, dtype: torch.dtype) -> None:
    weights = make_weights(6, 96, 160, dtype, packed)
    x, routing = make_rows(rows, k, 96, dtype)
    indices = choices(rows, k, 6)
    assert_agrees(experts_triton(x, indices, routing, weights), experts_torch(x, indices, routing, weights))


@pytest.mark.parametrize("kind", [GPT_OSS, SWIGLU])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("hidden", "inter"), [(40, 24), (72, 136), (130, 50)])
def test_sizes_that_fill_no_tile(hidden: int, inter: int, bias: bool, kind: tuple[float, float | None]) -> None:
    weights = make_weights(4, hidden, inter, torch.float32, bias=bias, kind=kind)
    x, routing = make_rows(7, 2, hidden, torch.float32)
    indices = choices(7, 2, 4)
    assert_agrees(experts_triton(x, indices, routing, weights), experts_torch(x, indices, routing, weights))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [16, 32, 64, 128])
def test_tiles_of_every_height(rows: int, packed: bool) -> None:
    """As configured for bfloat16; half of the experts get no row."""
    config = (MXFP4 if packed else PLAIN)[rows]
    dtype = torch.bfloat16 if CUDA else torch.float32
    weights = make_weights(6, 288, 96, dtype, packed)
    x, routing = make_rows(70, 2, 288, dtype)
    indices = 2 * choices(70, 2, 3)
    got = experts_triton(x, indices, routing, weights, config)
    assert_agrees(got, experts_torch(x, indices, routing, weights))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("splits", "weight_first"), [(1, False), (2, False), (3, True), (4, True)])
def test_shared_depth(splits: int, weight_first: bool, packed: bool) -> None:
    """Also with so many that the last have nothing to add."""
    tile = Tile(64, 128, 2, 4, weight_first, splits)
    for rows, k in ((1, 4), (3, 1), (20, 2)):
        weights = make_weights(5, 64, 320, torch.float32, packed)
        x, routing = make_rows(rows, k, 64, torch.float32)
        indices = choices(rows, k, 5)
        got = experts_triton(x, indices, routing, weights, Config(16, tile, tile))
        assert_agrees(got, experts_torch(x, indices, routing, weights))


@pytest.mark.parametrize("rows", [1, 40])
def test_all_rows_to_one_expert(rows: int) -> None:
    weights = make_weights(5, 64, 64, torch.float32)
    x, routing = make_rows(rows, 1, 64, torch.float32)
    indices = torch.full((rows, 1), 3, device=DEVICE)
    assert_agrees(experts_triton(x, indices, routing, weights), experts_torch(x, indices, routing, weights))


def test_no_rows() -> None:
    weights = make_weights(3, 64, 64, torch.float32)
    x, routing = make_rows(0, 2, 64, torch.float32)
    assert experts_triton(x, choices(0, 2, 3), routing, weights).shape == (0, 64)


def test_packed_weights_equal_their_numbers() -> None:
    """The specification of MXFP4 is that of the numbers that it holds."""
    weights = make_weights(4, 96, 64, torch.float32, packed=True)
    numbers = [
        Product(unpack_mxfp4(p.weight, p.scales[..., : p.weight.shape[2]], torch.float32), None, p.bias)
        for p in (weights.gate_up, weights.down)
        if p.scales is not None
    ]
    x, routing = make_rows(9, 2, 96, torch.float32)
    arguments = (x, choices(9, 2, 4), routing)
    plain = weights._replace(gate_up=numbers[0], down=numbers[1])
    torch.testing.assert_close(experts_torch(*arguments, weights), experts_torch(*arguments, plain))


def test_only_one_of_the_weights_packed() -> None:
    dtype = torch.bfloat16
    packed, plain = make_weights(4, 96, 64, dtype, packed=True), make_weights(4, 96, 64, dtype)
    x, routing = make_rows(9, 2, 96, dtype)
    indices = choices(9, 2, 4)
    for weights in (packed._replace(down=plain.down), plain._replace(down=packed.down)):
        assert_agrees(experts_triton(x, indices, routing, weights), experts_torch(x, indices, routing, weights))


def test_activations_are_transformers() -> None:
    gate, up = 10 * torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(activate(gate, up, *SWIGLU), torch.nn.functional.silu(gate) * up)
    low, within = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    torch.testing.assert_close(activate(gate, up, *GPT_OSS), (within + 1) * low * torch.sigmoid(1.702 * low))


def tiles_of(groups: Groups) -> list[tuple[int, list[int]]]:
    """(expert, pairs) of each tile that is not empty."""
    expert, first, last = (x.tolist() for x in groups[1:])
    return [(e, groups.order[a:b].tolist()) for e, a, b in zip(expert, first, last, strict=True) if b > a]


@pytest.mark.parametrize("group", [group_pairs_torch, group_pairs_triton])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("rows", "k", "num_experts"), [(1, 2, 3), (2, 4, 32), (37, 2, 5), (70, 4, 6), (200, 5, 7)])
def test_groups(group: object, rows: int, k: int, num_experts: int, block: int) -> None:
    """Every pair once, with its expert, in tiles of up to `block`, ascending; and as many tiles as were foreseen."""
    indices = choices(rows, k, num_experts)
    indices[indices == 1] = 0  # duplicates do no harm
    groups = group(indices, num_experts, block)  # type: ignore[operator]
    assert len(groups.expert) == most_tiles(rows * k, num_experts, block)
    expected: dict[int, list[int]] = {}
    for pair, expert in enumerate(indices.flatten().tolist()):
        expected.setdefault(expert, []).append(pair)
    split = [(e, expected[e][i : i + block]) for e in sorted(expected) for i in range(0, len(expected[e]), block)]
    assert tiles_of(groups) == split


def test_configurations_by_rows() -> None:
    weights = make_weights(32, 64, 64, torch.bfloat16, packed=True)
    assert [choose_config(rows, 4, 2, weights).rows for rows in (1, 8, 64, 128, 512, 4096)] == [16, 16, 16, 32, 64, 128]
    assert choose_config(1, 4, 2, weights).down.splits > choose_config(64, 4, 2, weights).down.splits


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 8, 64, MOST_IN_ONE_PROGRAM // 4 + 1, 1000])
@pytest.mark.parametrize(("hidden", "inter", "num_experts", "k"), [(2880, 2880, 32, 4), (2048, 768, 128, 8)])
def test_full_size_in_a_graph(hidden: int, inter: int, num_experts: int, k: int, rows: int, packed: bool) -> None:
    """Nothing waits for the device; a replay with other choices takes these."""
    weights = make_weights(num_experts, hidden, inter, torch.bfloat16, packed)
    x, routing = make_rows(rows, k, hidden, torch.bfloat16)
    indices = choices(rows, k, num_experts)
    experts(x, indices, routing, weights)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts(x, indices, routing, weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts(x, indices, routing, weights)
    for seed in (0, 1, 2):
        indices.copy_(choices(rows, k, num_experts, seed))
        out.fill_(float("nan"))
        graph.replay()
        assert_agrees(out, experts_torch(x, indices, routing, weights))
        first = out.clone()
        graph.replay()
        assert torch.equal(out, first)
