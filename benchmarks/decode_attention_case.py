"""What benchmarks/decode_attention.py measures on: a ragged batch over paged caches, our kernels, checks and times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from graph_timing import replay_times
from torch import Tensor

from peagle.kernels.attention_table import DecodeConfig, choose_config
from peagle.kernels.decode_attention import decode_attention_triton
from peagle.kernels.paged_attention import choose_splits, paged_attention_triton
from peagle.target.paged_attention import PagedBatch, paged_attention

MODELS = {"llama-8b": (32, 8, 128), "smollm2": (9, 3, 64)}  # query heads, kv heads, head_dim
PAGE, CONTEXTS, MAX_MODEL_LEN, CACHED_BYTES, MOST_LAYERS = 16, (500, 1100), 1280, 240e6, 256
WARM_REPLAYS, ROUNDS, REPLAYS = 6, 7, 2

Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, Hq, D], one layer's k and v cache -> [T, Hq, D]


@dataclass
class Case:
    """The batch of a shape, caches [pages, PAGE, Hkv, D] of several layers, and what one layer must read and write."""

    heads: tuple[int, int, int]
    rows: int
    contexts: list[int]
    batch: PagedBatch
    caches: list[tuple[Tensor, Tensor]]
    num_bytes: int

    @property
    def scale(self) -> float:
        return float(self.heads[2] ** -0.5)

    def queries(self) -> Tensor:
        """Fresh ones, as a slice of a joint projection has them."""
        heads, kv_heads, dim = self.heads
        shape = (len(self.batch.positions), heads + 2 * kv_heads, dim)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")[:, :heads]


def make_case(model: str, requests: int, rows: int) -> Case:
    """As many layers as keep a layer's keys out of L2 until its turn comes again."""
    g = torch.Generator().manual_seed(1000 * requests + rows)
    heads, kv_heads, dim = MODELS[model]
    contexts = torch.randint(*CONTEXTS, (requests,), generator=g)
    if requests == 1:
        contexts[0] = sum(CONTEXTS) // 2
    pages = MAX_MODEL_LEN // PAGE
    tables = torch.randperm(requests * pages, generator=g).view(requests, pages).int()
    tables[torch.arange(pages) * PAGE >= contexts[:, None]] = requests * pages  # a page of NaN, which nobody may read
    positions = (contexts[:, None] - rows + torch.arange(rows)).flatten()
    start = (torch.arange(requests + 1) * rows).int()
    tensors = [x.to("cuda") for x in (positions, start, contexts.int(), tables, torch.zeros_like(positions))]
    num_bytes = 2 * dim * (2 * int(contexts.sum()) * kv_heads + 2 * requests * rows * heads)
    caches = []
    for _ in range(min(MOST_LAYERS, max(3, round(CACHED_BYTES / num_bytes)))):
        pair = torch.randn(2, requests * pages + 1, PAGE, kv_heads, dim, dtype=torch.bfloat16, device="cuda")
        pair[:, -1] = float("nan")
        caches.append((pair[0], pair[1]))
    batch = PagedBatch(*tensors, rows, MAX_MODEL_LEN)
    return Case((heads, kv_heads, dim), rows, contexts.tolist(), batch, caches, num_bytes)


def general(case: Case) -> Form:
    """The general kernel as it runs without a table: with the splits that it chooses itself."""
    heads, kv_heads, _ = case.heads
    group_pad = 1 << (heads // kv_heads - 1).bit_length()
    tile = min(64, max(16, 1 << (case.rows * group_pad - 1).bit_length()))
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    splits = choose_splits(len(case.contexts), case.rows, max(1, tile // group_pad), kv_heads, MAX_MODEL_LEN, 2 * cores)
    return lambda q, k, v: paged_attention_triton(q, k, v, case.batch, case.scale, num_splits=splits)


def chosen(case: Case) -> DecodeConfig | None:
    """What the engine's table takes for this batch."""
    heads, kv_heads, dim = case.heads
    return choose_config(len(case.contexts), case.rows, kv_heads, heads // kv_heads, dim, 2)


def configured(case: Case, config: DecodeConfig) -> Form:
    return lambda q, k, v: decode_attention_triton(q, k, v, case.batch, case.scale, config)


def check(case: Case, form: Form) -> float:
    """Relative error against the PyTorch form in float32; NaN where an output was not written."""
    q, (k, v) = case.queries(), case.caches[-1]
    expected = paged_attention(q.float(), k, v, case.batch, case.scale)
    sizes = [(splits, *q.shape) for splits in (1, 2, 4, 8, 16)]
    poison = [torch.full(s, float("nan"), dtype=d, device="cuda") for s in sizes for d in (q.dtype, torch.float32)]
    del poison  # what the kernel allocates next lies in it
    return float((form(q, k, v).float() - expected).norm() / expected.norm())


def timed(case: Case, form: Form) -> list[float]:
    """Microseconds a layer, of ROUNDS rounds of a replayed graph over all layers."""
    q = case.queries()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for k, v in case.caches:
            form(q, k, v)
    return [us / len(case.caches) for us in replay_times(graph, WARM_REPLAYS, ROUNDS, REPLAYS)]
