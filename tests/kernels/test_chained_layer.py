"""A chained layer against the PyTorch form: interpreted on the CPU, compiled and launched early on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.kernels.fused_layer import (
    LayerWeights,
    add_rms_norm_torch,
    chain_for,
    finish_layer,
    rope_and_write_torch,
    silu_and_mul_torch,
    tune_layers,
)
from peagle.target.paged_attention import PagedBatch, paged_attention

pytest.importorskip("triton")
from peagle.kernels import chain_tuning, chained_layer
from peagle.kernels.chained_layer import Chain, run_layer_chained, use_chain
from peagle.kernels.skinny_linear import Config

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)
HEADS, KV_HEADS, DIM, HIDDEN, INTER = 4, 2, 16, 64, 96


def make_case(rows: int, bias: bool, q_norms: bool) -> tuple[LayerWeights, list[Tensor], PagedBatch]:
    """Weights; x, residual, cos, sin, the next norm's weight, and a k and a v cache; one request after 9 positions."""
    g = torch.Generator().manual_seed(rows)
    make = lambda *shape: torch.randn(*shape, generator=g).to(DEVICE, DTYPE)  # noqa: E731
    width = (HEADS + 2 * KV_HEADS) * DIM
    weights = LayerWeights(
        make(width, HIDDEN) / 8, make(width) if bias else None, make(HIDDEN, HEADS * DIM) / 8,
        make(HIDDEN) if bias else None, make(2 * INTER, HIDDEN) / 8, make(HIDDEN, INTER) / 10, make(HIDDEN),
        make(DIM) if q_norms else None, make(DIM) if q_norms else None, 1e-5, HEADS, KV_HEADS, DIM, DIM**-0.5,
    )  # fmt: skip
    tensors = [make(rows, HIDDEN), make(rows, HIDDEN), make(rows, DIM), make(rows, DIM), make(HIDDEN)]
    tensors += [make(8, 4, KV_HEADS, DIM), make(8, 4, KV_HEADS, DIM)]
    context = 9 + rows
    table = torch.tensor([[5, 2, 7, 1, 0, 3]], dtype=torch.int32)
    positions = torch.arange(9, context)
    slots = table[0].long()[positions // 4] * 4 + positions % 4
    starts, contexts = (torch.tensor(x, dtype=torch.int32) for x in ([0, rows], [context]))
    parts = [x.to(DEVICE) for x in (positions, starts, contexts, table, slots)]
    return weights, tensors, PagedBatch(*parts, rows, 24)


def run_torch(weights: LayerWeights, tensors: list[Tensor], batch: PagedBatch) -> tuple[Tensor, Tensor]:
    x, residual, cos, sin, norm, *cache = tensors
    qkv = F.linear(x, weights.qkv, weights.qkv_bias)
    q = rope_and_write_torch(qkv, cos, sin, weights, (cache[0], cache[1]), batch.slot_mapping)
    out = paged_attention(q, cache[0], cache[1], batch, weights.scale)
    out = F.linear(out.view(len(x), -1), weights.o, weights.o_bias)
    hidden, normed = add_rms_norm_torch(out, residual, weights.post_norm, weights.eps)
    gated = silu_and_mul_torch(F.linear(normed, weights.gate_up))
    return add_rms_norm_torch(F.linear(gated, weights.down), hidden, norm, weights.eps)


@pytest.mark.parametrize(("splits", "weight_first"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize(("rows", "bias", "q_norms"), [(8, False, False), (14, True, True)])
def test_equals_pytorch(splits: int, weight_first: bool, rows: int, bias: bool, q_norms: bool) -> None:
    weights, tensors, batch = make_case(rows, bias, q_norms)
    plain = Config(64 if weight_first else 32, 32, 2, splits, weight_first, 1 << 11, rolls=64 if weight_first else 0)
    configs = {("plain", *w.shape): plain for w in (weights.qkv, weights.o, weights.down)}
    chain = Chain({**configs, ("gated", *weights.gate_up.shape): plain._replace(splits=1)}, CUDA)
    assert_equals_pytorch(weights, tensors, batch, chain)


@pytest.mark.parametrize("splits", [1, 2, 3])
def test_rounds_where_unchained_layers_round(splits: int) -> None:
    """In 16 bits nearly every number is the same, however the depth is split: attention's product is rounded before it
    is added, the MLP's is not."""
    weights, tensors, _ = make_case(14, False, False)
    small = torch.bfloat16 if CUDA else torch.float16  # the interpreter multiplies no bf16
    half = lambda x: x.to(small)  # noqa: E731
    weights = replace(weights, **{name: half(getattr(weights, name)) for name in ("o", "gate_up", "down", "post_norm")})
    attended, residual, norm = half(tensors[0]), half(tensors[1]), half(tensors[4])
    config = Config(32, 32, 2, splits, False, 1 << 11)
    chain = Chain({("plain", *w.shape): config for w in (weights.o, weights.down)}, CUDA)
    chain.configs["gated", *weights.gate_up.shape] = config._replace(splits=1)  # type: ignore[index]
    hidden, normed = chained_layer.finish_layer_chained(attended, residual, weights, norm, chain)
    added = F.linear(attended.float(), weights.o.float()).to(small) + residual
    gated = silu_and_mul_torch(F.linear(F.rms_norm(added, (HIDDEN,), weights.post_norm, weights.eps), weights.gate_up))
    total = (F.linear(gated.float(), weights.down.float()) + added.float()).to(small)
    assert (hidden != total).float().mean() < 0.02
    assert (normed != F.rms_norm(total, (HIDDEN,), norm, weights.eps)).float().mean() < 0.05


@pytest.mark.parametrize("name", ["defaults", *chain_tuning.CANDIDATES])
def test_candidates_equal_pytorch(name: str) -> None:
    """Those measured for a Llama-8B's products, each in its place, and those for products of any shape."""
    weights, tensors, batch = make_case(8, True, False)
    chain = replace(chain_tuning.CANDIDATES.get(name, Chain()), is_early=CUDA)
    if name == "measured":
        ours = (weights.gate_up, weights.down, weights.qkv, weights.o)
        pairs = zip(ours, chain_tuning.MEASURED.items(), strict=True)
        chain = replace(chain, configs={(key[0], *weight.shape): config for weight, (key, config) in pairs})
        assert chain.config("gated", weights.gate_up) == next(iter(chain_tuning.MEASURED.values()))
    assert_equals_pytorch(weights, tensors, batch, chain)


def assert_equals_pytorch(weights: LayerWeights, tensors: list[Tensor], batch: PagedBatch, chain: Chain) -> None:
    caches = [[cache.clone() for cache in tensors[5:]] for _ in range(2)]
    expected = run_torch(weights, [*tensors[:5], *caches[0]], batch)
    x, residual, cos, sin, norm = tensors[:5]
    ours = run_layer_chained(x, residual, weights, cos, sin, (caches[1][0], caches[1][1]), batch, norm, chain)
    tolerance = 6e-2 if CUDA else 1e-4
    for a, b in zip([*ours, *caches[1]], [*expected, *caches[0]], strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)


@pytest.fixture
def nothing_tuned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chained_layer, "_chain", "tuned")
    monkeypatch.setattr(chained_layer, "fastest_chains", {})
    monkeypatch.setattr(chain_tuning, "fastest_chains", chained_layer.fastest_chains)
    monkeypatch.setattr(chain_tuning, "timings", {})


@pytest.mark.usefixtures("nothing_tuned")
def test_used_for_few_rows_of_a_gpu_only() -> None:
    few, many = (torch.zeros(n, 8, dtype=torch.bfloat16, device=DEVICE) for n in (16, 17))
    weights = make_case(8, False, False)[0]
    assert chain_for(few, weights) is None  # nothing measured
    use_chain(Chain())
    assert (chain_for(few, weights) is not None) == CUDA
    assert chain_for(many, weights) is None
    assert chain_for(few.float(), weights) is None
    use_chain(None)
    assert chain_for(few, weights) is None


@pytest.mark.usefixtures("nothing_tuned")
@pytest.mark.parametrize(
    ("took", "name"),
    [
        ({"none": 3.0, "measured": 2.0, "rolling": 2.5}, "measured"),
        ({"none": 3.0, "measured": 2.0, "rolling": 1.0}, "rolling"),
        ({"none": 2.0, "measured": 2.0, "rolling": 2.5}, "none"),
        ({"none": 2.0, "rolling": 1.5}, "rolling"),  # the card could not run the other
        ({"none": 2.0}, "none"),
    ],
)
def test_the_fastest_is_chosen_for_a_shape(monkeypatch: pytest.MonkeyPatch, took: dict[str, float], name: str) -> None:
    asked: list[set[str]] = []

    def time_forms(forms: dict[str, object]) -> dict[str, float]:
        asked.append(set(forms))
        return took

    monkeypatch.setattr(chain_tuning, "time_forms", time_forms)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    layer = make_case(8, False, False)[0]
    first = replace(layer, qkv=torch.cat((layer.qkv, layer.qkv), dim=1))  # as a drafter's
    chain_tuning.tune_chain([first, layer])
    chain_tuning.tune_chain([layer] * 3)  # of the same shapes: not measured again
    assert asked == [{"none", "measured", "rolling"}]
    x = torch.zeros(16, HIDDEN, dtype=torch.bfloat16)
    expected = chain_tuning.CANDIDATES.get(name)
    assert chained_layer.chain_for(x, layer) is expected
    assert chained_layer.chain_for(x, first) is None  # not its shape
    assert chained_layer.chain_for(x.new_zeros(17, HIDDEN), layer) is None
    assert chained_layer.chain_for(x.float(), layer) is None
    forced = Chain()
    use_chain(forced)
    assert chained_layer.chain_for(x, first) is forced
    use_chain("tuned")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    assert chained_layer.chain_for(x, layer) is None
    (found,) = chain_tuning.findings().values()
    assert found.startswith(f"chain {name} (none ")


@pytest.mark.parametrize("name", chain_tuning.CANDIDATES)
def test_the_forms_measured_compute_the_same(name: str) -> None:
    weights, tensors, _ = make_case(8, True, False)
    layers, inputs = [weights] * 2, (tensors[0], tensors[1], tensors[0])
    chain = replace(chain_tuning.CANDIDATES[name], is_early=CUDA)
    ours = chain_tuning.run_chained(layers, *inputs, chain)
    torch.testing.assert_close(ours, chain_tuning.run_unchained(layers, *inputs), atol=6e-2, rtol=6e-2)
    hidden = finish_layer(tensors[0], finish_layer(tensors[0], tensors[1], weights), weights)
    expected = F.rms_norm(hidden, hidden.shape[1:], weights.post_norm, weights.eps)
    torch.testing.assert_close(ours, expected, atol=6e-2, rtol=6e-2)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.usefixtures("nothing_tuned")
def test_layers_are_measured_when_they_are_tuned() -> None:
    weights = make_case(8, True, False)[0]
    tune_layers([weights] * 2)
    if torch.cuda.get_device_capability() < (9, 0):
        assert not chain_tuning.timings
        return
    (took,) = chain_tuning.timings.values()
    assert set(took) == {"none", *chain_tuning.CANDIDATES}
    assert all(us > 0 for us in took.values())
    assert list(chained_layer.fastest_chains) == [chained_layer.shapes_of(weights)]


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
def test_layers_in_a_recorded_graph() -> None:
    """Each layer reads what the one before wrote, in memory that is used again: a missing wait would show."""
    weights, tensors, batch = make_case(8, False, False)
    x, residual, cos, sin, norm = tensors[:5]
    cache = (tensors[5], tensors[6])

    def run(chain: Chain) -> Tensor:
        hidden, normed = residual, x
        for _ in range(40):
            hidden, normed = run_layer_chained(normed, hidden, weights, cos, sin, cache, batch, norm, chain)
        return normed

    expected = run(Chain(is_early=False))
    run(Chain())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours = run(Chain())
    for _ in range(20):
        ours.fill_(float("nan"))
        graph.replay()
        torch.testing.assert_close(ours, expected, atol=0, rtol=0)
