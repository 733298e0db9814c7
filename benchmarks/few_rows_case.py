"""What benchmarks/few_rows.py measures on: layers of a Llama-8B's shape, how products are checked and chains timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from graph_timing import replay_times
from torch import Tensor

from peagle.kernels.fused_layer import LayerWeights
from peagle.kernels.skinny_linear import Mode
from peagle.target.paged_attention import PagedBatch

HIDDEN, INTER, HEADS, KV_HEADS, DIM = 4096, 14336, 32, 8, 128
LAYERS, CONTEXT, MAX_MODEL_LEN, PAGE = 8, 800, 1280, 16
WARM_REPLAYS, ROUNDS, REPLAYS = 4, 7, 4


def random(*shape: int) -> Tensor:
    """As large as keeps a product's numbers near 1."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda") / shape[-1] ** 0.5


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device="cuda")


@dataclass
class Case:
    """Rows of one request behind CONTEXT positions, over the weights and caches of LAYERS layers; num_bytes: what one
    layer must read."""

    x: Tensor
    norm: Tensor
    cos: Tensor
    sin: Tensor
    layers: list[LayerWeights]
    caches: list[tuple[Tensor, Tensor]]
    batch: PagedBatch
    num_bytes: int

    def weights_of_first(self) -> dict[str, tuple[Mode, Tensor]]:
        first = self.layers[0]
        return {
            "gate-up": ("gated", first.gate_up),
            "down": ("plain", first.down),
            "qkv": ("plain", first.qkv),
            "o": ("plain", first.o),
        }


def make_case(rows: int) -> Case:
    layers, caches = [], []
    pages = MAX_MODEL_LEN // PAGE
    for _ in range(LAYERS):
        layers.append(
            LayerWeights(
                random((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), None, random(HIDDEN, HEADS * DIM), None,
                random(2 * INTER, HIDDEN), random(HIDDEN, INTER), torch.rand(HIDDEN, device="cuda").bfloat16() + 0.5,
                None, None, 1e-5, HEADS, KV_HEADS, DIM, DIM**-0.5,
            )
        )  # fmt: skip
        pair = torch.randn(2, pages, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16, device="cuda")
        caches.append((pair[0], pair[1]))
    first = layers[0]
    positions = torch.arange(CONTEXT, CONTEXT + rows)
    table = torch.randperm(pages)[None].int()
    slots = table[0].long()[positions // PAGE] * PAGE + positions % PAGE
    starts, contexts = (torch.tensor(x, dtype=torch.int32) for x in ([0, rows], [CONTEXT + rows]))
    parts = [x.to("cuda") for x in (positions, starts, contexts, table, slots)]
    angles = torch.rand(rows, DIM, device="cuda") * 6
    weights = (first.qkv, first.o, first.gate_up, first.down)
    num_bytes = sum(w.nbytes for w in weights) + 2 * 2 * (CONTEXT + rows) * KV_HEADS * DIM
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    norm = torch.rand(HIDDEN, device="cuda").bfloat16() + 0.5
    batch = PagedBatch(*parts, rows, MAX_MODEL_LEN)
    return Case(x, norm, angles.cos().bfloat16(), angles.sin().bfloat16(), layers, caches, batch, num_bytes)


def check(mode: Mode, weight: Tensor, rows: int, form: Callable[[Tensor, Tensor], Tensor]) -> float:
    """Relative error against float32 on fresh rows; NaN where an output was not written."""
    x = torch.randn(rows, weight.shape[1], dtype=torch.bfloat16, device="cuda")
    expected = F.linear(x.float(), weight.float())
    if mode == "gated":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    return float((form(x, weight).float() - expected).norm() / expected.norm())


def recorded(run: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph, out


def replayed(run: Callable[[], Tensor]) -> list[float]:
    """Microseconds of a replay, of ROUNDS rounds."""
    graph, _ = recorded(run)
    return replay_times(graph, WARM_REPLAYS, ROUNDS, REPLAYS)


def errors_of_chain(present: Callable[[], Tensor], chained: Callable[[], Tensor]) -> tuple[float, int]:
    """Relative error of the chain's last output against the present form's, and how many of 50 replays, over an output
    full of NaN, differ from the first: a kernel that reads before it may would show."""
    expected = present().clone()
    graph, out = recorded(chained)
    graph.replay()
    first, changed = out.clone(), 0
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        changed += not torch.equal(out, first)
    return float((first.float() - expected.float()).norm() / expected.float().norm()), changed
