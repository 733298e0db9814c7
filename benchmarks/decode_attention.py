"""Attention of a decoding step over a ragged paged cache: every configuration of our kernel beside the general one.

    python benchmarks/decode_attention.py [--models llama-8b] [--shapes 64x8,8x8] [--seconds 70] [--json out.json]

Needs a GPU. A shape is REQUESTS x ROWS a request, contexts are drawn from 500..1100. Each configuration is first
compared with the PyTorch form in float32, on fresh queries and over memory full of NaN, then timed as a replayed CUDA
graph over as many layers' caches as keep them out of L2. The floor is reading keys, values and queries and writing the
outputs once at the bandwidth measured in the same run. The configurations to use go into `kernels/attention_table.py`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.bench.json_file import check_writable, write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.kernels.attention_table import DecodeConfig, tile_rows
from peagle.kernels.decode_attention import decode_attention_triton
from peagle.kernels.paged_attention import paged_attention_triton
from peagle.target.paged_attention import PagedBatch, paged_attention

MODELS = {"llama-8b": (32, 8, 128), "smollm2": (9, 3, 64)}  # query heads, kv heads, head_dim
SHAPES = "64x8,64x14,64x4,64x1,8x8,1x8,1x1"
PAGE, CONTEXTS, MAX_MODEL_LEN, CACHED_BYTES, ROUNDS = 16, (500, 1100), 1280, 240e6, 7

Form = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, Hq, D], one layer's k and v cache -> [T, Hq, D]

# by rows of a tile: (block_n, num_warps, num_stages, keys_first)
FORMS: dict[int, list[tuple[int, int, int, bool]]] = {
    16: [(32, 2, 3, False), (32, 2, 4, False), (32, 4, 3, False), (64, 4, 2, False), (64, 4, 3, False),
         (64, 4, 2, True), (64, 4, 3, True)],
    32: [(32, 2, 3, False), (32, 2, 4, False), (32, 4, 3, False), (32, 4, 4, False), (64, 4, 2, False),
         (64, 4, 3, False), (64, 4, 2, True), (64, 4, 3, True)],
    64: [(32, 4, 3, False), (32, 4, 4, False), (64, 4, 2, False), (64, 4, 3, False), (64, 4, 2, True),
         (64, 8, 3, False), (128, 8, 2, False)],
}  # fmt: skip


def candidates(requests: int, rows: int, heads: int, kv_heads: int) -> list[DecodeConfig]:
    programs = requests * kv_heads
    splits = (4, 8, 16) if programs < 16 else (2, 4, 8) if programs < 128 else (1, 2)
    forms = FORMS[tile_rows(rows, heads // kv_heads)]
    return [DecodeConfig(n, warps, stages, s, keys) for n, warps, stages, keys in forms for s in splits]


def name(config: DecodeConfig) -> str:
    keys = "k" if config.keys_first else ""
    return f"{config.block_n}{keys}/{config.num_warps}/{config.num_stages}/{config.num_splits}"


@dataclass
class Case:
    """The batch of a shape, caches [pages, PAGE, Hkv, D] of several layers, and what one layer must read and write."""

    heads: tuple[int, int, int]
    rows: int
    contexts: list[int]
    batch: PagedBatch
    caches: list[tuple[Tensor, Tensor]]
    num_bytes: int

    def queries(self) -> Tensor:
        """Fresh ones, as a slice of a joint projection has them."""
        heads, kv_heads, dim = self.heads
        shape = (len(self.batch.positions), heads + 2 * kv_heads, dim)
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")[:, :heads]


def make_case(model: str, requests: int, rows: int) -> Case:
    g = torch.Generator().manual_seed(1000 * requests + rows)
    heads, kv_heads, dim = MODELS[model]
    contexts = torch.randint(*CONTEXTS, (requests,), generator=g)
    if requests == 1:
        contexts[0] = sum(CONTEXTS) // 2
    pages = MAX_MODEL_LEN // PAGE
    tables = torch.randperm(requests * pages, generator=g).view(requests, pages).int()
    tables[torch.arange(pages) * PAGE >= contexts[:, None]] = 2**31 - 1  # a kernel that follows these fails
    positions = (contexts[:, None] - rows + torch.arange(rows)).flatten()
    start = (torch.arange(requests + 1) * rows).int()
    tensors = [x.cuda() for x in (positions, start, contexts.int(), tables, torch.zeros_like(positions))]
    num_bytes = 2 * dim * (2 * int(contexts.sum()) * kv_heads + 2 * requests * rows * heads)
    layers = min(64, max(3, round(CACHED_BYTES / num_bytes)))
    make = lambda: torch.randn(requests * pages, PAGE, kv_heads, dim, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    caches = [(make(), make()) for _ in range(layers)]
    batch = PagedBatch(*tensors, rows, MAX_MODEL_LEN)
    return Case((heads, kv_heads, dim), rows, contexts.tolist(), batch, caches, num_bytes)


def general(case: Case) -> Form:
    """The general kernel, whatever the table says."""
    from peagle.kernels.paged_attention import choose_splits

    heads, kv_heads, dim = case.heads
    pad = 1 << (heads // kv_heads - 1).bit_length()
    block_q = max(1, min(64, max(16, 1 << (case.rows * pad - 1).bit_length())) // pad)
    cores = 2 * torch.cuda.get_device_properties(0).multi_processor_count
    splits = choose_splits(len(case.contexts), case.rows, block_q, kv_heads, MAX_MODEL_LEN, cores)
    return lambda q, k, v: paged_attention_triton(q, k, v, case.batch, dim**-0.5, num_splits=splits)


def configured(case: Case, config: DecodeConfig) -> Form:
    return lambda q, k, v: decode_attention_triton(q, k, v, case.batch, case.heads[2] ** -0.5, config)


def torch_flash(case: Case) -> Form:
    """FlashAttention as PyTorch brings it: its pages hold 256 positions or more, so it gets contiguous keys."""
    starts = torch.tensor([0, *case.contexts]).cumsum(0).int().cuda()
    contiguous: dict[int, tuple[Tensor, Tensor]] = {}
    for k, v in case.caches:
        pair = []
        for cache in (k, v):
            tables = zip(case.batch.block_tables, case.contexts, strict=True)
            pair.append(torch.cat([cache[t[: -(-n // PAGE)].long()].flatten(0, 1)[:n] for t, n in tables]))
        contiguous[k.data_ptr()] = (pair[0], pair[1])

    def run(q: Tensor, k: Tensor, _v: Tensor) -> Tensor:
        keys, values = contiguous[k.data_ptr()]
        return torch.ops.aten._flash_attention_forward(
            q, keys, values, case.batch.query_start, starts, case.rows, max(case.contexts), 0.0, True, False,
            scale=case.heads[2] ** -0.5,
        )[0]  # fmt: skip

    return run


def check(case: Case, form: Form) -> float:
    """Relative error against the PyTorch form in float32; NaN where an output was not written."""
    q, (k, v) = case.queries(), case.caches[-1]
    expected = paged_attention(q.float(), k, v, case.batch, case.heads[2] ** -0.5)
    poison = [torch.full((n, *q.shape), float("nan"), dtype=d, device="cuda")
              for n in (1, 2, 4, 8, 16) for d in (q.dtype, torch.float32)]  # fmt: skip
    del poison  # what the kernel allocates next lies in it
    error = (form(q, k, v).float() - expected).norm() / expected.norm()
    return float(error)


def timed(case: Case, form: Form) -> list[float]:
    """Microseconds a layer, of ROUNDS rounds of a replayed graph."""
    q = case.queries()

    def run() -> None:
        for k, v in case.caches:
            form(q, k, v)

    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(4):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / (4 * len(case.caches)))
    return times


def bandwidth() -> float:
    """Bytes a second that a reduction reads; the best of several."""
    x = torch.zeros(2**30, dtype=torch.float32, device="cuda")
    best = 0.0
    for _ in range(10):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        x.sum()
        torch.cuda.synchronize()
        best = max(best, x.nbytes / (time.perf_counter() - begin))
    return best


def compile_one(job: tuple[str, int, int, DecodeConfig | None]) -> None:
    """In a process of its own: run once, so that the compiled kernel is in Triton's cache on the disk."""
    model, requests, rows, config = job
    try:
        case = make_case(model, requests, rows)
        form = general(case) if config is None else configured(case, config)
        form(case.queries(), *case.caches[0])
        torch.cuda.synchronize()
    except Exception:  # it fails again when it is its turn, and is reported then
        pass


def compile_all(models: list[str], shapes: list[tuple[int, int]]) -> None:
    jobs: dict[Any, tuple[str, int, int, DecodeConfig | None]] = {}
    for model in models:
        heads, kv_heads, _ = MODELS[model]
        for requests, rows in shapes:
            jobs[model, requests, rows] = (model, requests, rows, None)
            for config in candidates(requests, rows, heads, kv_heads):
                tile, facts = tile_rows(rows, heads // kv_heads), asdict(config)
                facts["num_splits"] = min(2, config.num_splits)  # how many does not change the kernel
                jobs[model, tile, tuple(facts.values())] = (model, 1, rows, DecodeConfig(**facts))
    with ProcessPoolExecutor(12, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs.values(), chunksize=1))


def measure(case: Case, config: DecodeConfig | None, form: Form) -> dict[str, Any]:
    """error, us (all rounds); or why there is no time."""
    found: dict[str, Any] = {"config": None if config is None else asdict(config)}
    try:
        found["error"] = check(case, form)
        if not found["error"] < 1e-2:
            return found | {"failed": f"relative error {found['error']:.2g}"}
        return found | {"us": timed(case, form)}
    except Exception as error:  # not for this card or shape: say so and go on
        return found | {"failed": f"{error.__class__.__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-8b,smollm2")
    parser.add_argument("--shapes", default=SHAPES, help="REQUESTSxROWS, by commas.")
    parser.add_argument("--seconds", type=float, default=70, help="Start no further configuration after this.")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.json is not None:
        check_writable(args.json)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/decode_attention.py needs a CUDA device")
    begin = time.perf_counter()
    models = args.models.split(",")
    shapes = [(int(a), int(b)) for a, b in (shape.split("x") for shape in args.shapes.split(","))]
    compile_all(models, shapes)
    facts, speed = machine_facts(torch.device("cuda"), torch.bfloat16), bandwidth()
    print(
        f"{machine_line(facts)}\nread bandwidth {speed / 1e9:.0f} GB/s; compiled in {time.perf_counter() - begin:.0f} s"
    )
    results, skipped = [], 0
    table = [["model", "shape", "floor us", "general", "ratio", "best", "min..max", "GB/s", "ratio", "configuration",
              "torch flash"]]  # fmt: skip
    for model in models:
        for requests, rows in shapes:
            case = make_case(model, requests, rows)
            floor = case.num_bytes / speed * 1e6
            found = {
                "general": measure(case, None, general(case)),
                "torch flash": measure(case, None, torch_flash(case)),
            }
            for config in candidates(requests, rows, *case.heads[:2]):
                if time.perf_counter() - begin > args.seconds:
                    skipped += 1
                    continue
                found[name(config)] = measure(case, config, configured(case, config))
            results.append({"model": model, "requests": requests, "rows": rows, "contexts": case.contexts,
                            "bytes": case.num_bytes, "floor_us": floor, "forms": found})  # fmt: skip
            median = {key: statistics.median(x["us"]) for key, x in found.items() if "us" in x}
            print(f"{model} {requests}x{rows}: " + " ".join(f"{key} {us:.1f}" for key, us in median.items()))
            for key, x in found.items():
                if "failed" in x:
                    print(f"  {key} left out: {x['failed']}")
            ours = {key: us for key, us in median.items() if found[key]["config"] is not None}
            if not ours:
                continue
            best, old = min(ours, key=lambda key: ours[key]), median.get("general", float("nan"))
            us = found[best]["us"]
            table.append([model, f"{requests}x{rows}", f"{floor:.1f}", f"{old:.1f}", f"{old / floor:.2f}",
                          f"{ours[best]:.1f}", f"{min(us):.1f}..{max(us):.1f}",
                          f"{case.num_bytes / ours[best] / 1e3:.0f}", f"{ours[best] / floor:.2f}", best,
                          f"{median.get('torch flash', float('nan')):.1f}"])  # fmt: skip
            del case
    print("\nus a layer; a configuration is block_n (k: keys first) / warps / stages / splits\n" + align(table, left=2))
    print(f"{time.perf_counter() - begin:.0f} s, {skipped} configurations not timed")
    if args.json is not None:
        write_json(args.json, {"machine": facts, "bytes_per_second": speed, "results": results, "not_timed": skipped})


if __name__ == "__main__":
    main()
