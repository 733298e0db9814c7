"""Which chain of early launches suits a model: measured on its own layers when it is loaded, like its products.

What is measured is a layer without RoPE and attention, whose time depends on the context and not on the model's shape,
for a few of the model's layers in turn, so that no weight is found in a cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.errors import TritonError

from peagle.kernels.chained_layer import Chain, Shapes, fastest_chains, finish_layer_chained, shapes_of
from peagle.kernels.fused_layer import TUNED_LAYERS, LayerWeights, finish_layer, linear
from peagle.kernels.fused_layer_triton import rms_norm_triton
from peagle.kernels.skinny_linear import Config, Mode

# (mode, weight rows, weight columns) -> what benchmarks/few_rows.py found on an H200, for a Llama-8B's layer
MEASURED: dict[tuple[Mode, int, int], Config] = {
    ("gated", 28672, 4096): Config(64, 64, 5, 1, True, 1 << 14),
    ("plain", 4096, 14336): Config(64, 128, 6, 2, True, 1 << 16, 128),
    ("plain", 6144, 4096): Config(64, 128, 4, 2, True, 0),
    ("plain", 4096, 4096): Config(64, 256, 3, 2, True, 1 << 15, 64),
}
# Fetching ahead all along: slower on a Llama-8B's layers, tried because a small model's are another matter.
ROLLING: dict[Mode, Config] = {
    "plain": Config(64, 128, 4, 2, True, 1 << 16, 64),
    "gated": Config(64, 64, 5, 1, True, 1 << 16, 64),
}
CANDIDATES = {"measured": Chain(MEASURED), "rolling": Chain(defaults=ROLLING)}
ROWS, ROUNDS = 8, 9
# shapes -> what was tried ("none": unchained) and its microseconds a layer
timings: dict[Shapes, dict[str, float]] = {}


def tune_chain(layers: Sequence[LayerWeights]) -> None:
    """Measure these layers of a model on a GPU of compute capability 9.0 or later, unchained and with each candidate,
    unless its shapes are known; `chained_layer.fastest_chains` keeps the result. Products are to be tuned before."""
    key = shapes_of(layers[-1])
    if key in fastest_chains:
        return
    some = layers[:TUNED_LAYERS]
    inputs = layer_inputs(some[0])
    forms = {"none": partial(run_unchained, some, *inputs)}
    for name, chain in CANDIDATES.items():
        forms[name] = partial(run_chained, some, *inputs, chain)
    timings[key] = took = {name: ms * 1000 / len(some) for name, ms in time_forms(forms).items()}
    fastest_chains[key] = CANDIDATES.get(_least(took))


def findings() -> dict[str, str]:
    """What `tune_chain` has chosen so far and what it measured, to be read by people."""
    return {
        "layer " + ", ".join(f"{height}x{depth}" for height, depth in shapes): "chain {} ({})".format(
            _least(took), ", ".join(f"{name} {us:.1f} us" for name, us in took.items())
        )
        for shapes, took in timings.items()
    }


def _least(took: dict[str, float]) -> str:
    """Of equals the first, which is "none"."""
    return min(took, key=lambda name: took[name], default="none")


def layer_inputs(first: LayerWeights) -> tuple[Tensor, Tensor, Tensor]:
    """ROWS rows of zeros: what the first layer's qkv reads, the residual, and what attention would give."""
    assert isinstance(first.qkv, Tensor)
    assert isinstance(first.o, Tensor)
    widths = (first.qkv.shape[1], len(first.post_norm), first.o.shape[1])
    x, residual, attended = (first.qkv.new_zeros(ROWS, width) for width in widths)
    return x, residual, attended


def run_unchained(layers: Sequence[LayerWeights], x: Tensor, residual: Tensor, attended: Tensor) -> Tensor:
    """Layers without RoPE and attention, as `run_layer` computes them; post_norm stands for the next layer's norm."""
    for weights in layers:
        linear(x, weights.qkv, weights.qkv_bias)
        residual = finish_layer(attended, residual, weights)
        x = rms_norm_triton(residual, weights.post_norm, weights.eps)
    return x


def run_chained(layers: Sequence[LayerWeights], x: Tensor, residual: Tensor, attended: Tensor, chain: Chain) -> Tensor:
    """The same as `run_layer_chained` computes them."""
    for weights in layers:
        chain.product("plain", x, weights.qkv, weights.qkv_bias)
        residual, x = finish_layer_chained(attended, residual, weights, weights.post_norm, chain)
    return x


def time_forms(forms: Mapping[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Milliseconds of each form that the card can run, the median of replays of its graph, the forms taking turns: so
    that none has the card when it is cooler, or not awake yet."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, run in forms.items():
        try:
            run()  # compiles
        except TritonError:  # say, more shared memory than the card has
            continue
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            run()
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: statistics.median(several[1:]) for name, several in times.items()}
