"""Attention of verification rows over a paged cache: our Triton kernel beside whatever libraries are installed.

    python benchmarks/attention.py [--rows 8] [--batches 1,8,64] [--contexts 512,2048,8192] [--json out.json]

Needs a GPU. Compared when they can be imported: FlashInfer (its paged prefill wrapper, planned outside the timing),
FlashAttention 3 as vLLM ships it, FlashAttention's CuTe release, and FlexAttention, which gets contiguous caches
because it knows no pages of 16. Times are of a replayed CUDA graph over several layers' caches, so that no cache stays
in L2; every result is compared with the PyTorch form.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle.bench.json_file import write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.kernels.paged_attention import paged_attention_triton
from peagle.target.paged_attention import PagedBatch, paged_attention

HEADS, KV_HEADS, DIM, PAGE, LAYERS, ROUNDS = 32, 8, 128, 16, 8, 9
SCALE = DIM**-0.5


@dataclass
class Case:
    """q [T, Hq, D] of `rows` rows a request at the end of its context, over LAYERS caches."""

    q: Tensor
    caches: list[tuple[Tensor, Tensor]]
    batch: PagedBatch
    rows: int
    context: int


def make_case(requests: int, rows: int, context: int, device: torch.device) -> Case:
    pages = -(-context // PAGE)
    g = torch.Generator().manual_seed(0)
    tables = torch.randperm(requests * pages, generator=g).view(requests, pages).int().to(device)
    make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device=device)  # noqa: E731
    positions = torch.arange(context - rows, context, device=device).repeat(requests)
    batch = PagedBatch(
        positions,
        (torch.arange(requests + 1, device=device) * rows).int(),
        torch.full((requests,), context, dtype=torch.int32, device=device),
        tables,
        torch.zeros_like(positions),
        rows,
        context,
    )
    caches = [
        (make(requests * pages, PAGE, KV_HEADS, DIM), make(requests * pages, PAGE, KV_HEADS, DIM))
        for _ in range(LAYERS)
    ]
    return Case(make(requests * rows, HEADS, DIM), caches, batch, rows, context)


# one attention over one layer's cache: (k cache, v cache) -> [T, Hq, D]
Form = Callable[[Tensor, Tensor], Tensor]


def ours(case: Case) -> Form:
    return lambda k, v: paged_attention_triton(case.q, k, v, case.batch, SCALE)


def flashinfer(case: Case) -> Form:
    import flashinfer

    batch, requests = case.batch, len(case.batch.context_lens)
    pages = batch.block_tables.shape[1]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
        torch.zeros(256 * 2**20, dtype=torch.uint8, device=case.q.device), "NHD"
    )
    wrapper.plan(
        batch.query_start,
        torch.arange(requests + 1, dtype=torch.int32, device=case.q.device) * pages,
        batch.block_tables.flatten(),
        torch.full((requests,), (case.context - 1) % PAGE + 1, dtype=torch.int32, device=case.q.device),
        HEADS,
        KV_HEADS,
        DIM,
        PAGE,
        causal=True,
        sm_scale=SCALE,
        q_data_type=torch.bfloat16,
    )
    return lambda k, v: wrapper.run(case.q, (k, v))


def varlen(function: Callable[..., Any], case: Case, **extra: Any) -> Form:
    batch = case.batch

    def run(k: Tensor, v: Tensor) -> Tensor:
        out = function(
            case.q,
            k,
            v,
            cu_seqlens_q=batch.query_start,
            max_seqlen_q=case.rows,
            max_seqlen_k=case.context,
            seqused_k=batch.context_lens,
            softmax_scale=SCALE,
            causal=True,
            **extra,
        )
        return out[0] if isinstance(out, tuple) else out

    return run


def vllm_flash_attention(case: Case) -> Form:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return varlen(flash_attn_varlen_func, case, block_table=case.batch.block_tables, fa_version=3)


def flash_attention_cute(case: Case) -> Form:
    from flash_attn.cute import flash_attn_varlen_func

    return varlen(flash_attn_varlen_func, case, page_table=case.batch.block_tables)


def flex_attention(case: Case) -> Form:
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    requests, rows, context = len(case.batch.context_lens), case.rows, case.context

    def seen(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key <= query + (context - rows)

    mask = create_block_mask(seen, requests, None, rows, context, device=case.q.device)
    compiled = torch.compile(flex, dynamic=False)
    q = case.q.view(requests, rows, HEADS, DIM).transpose(1, 2)
    contiguous = {}
    for k, v in case.caches:
        table = case.batch.block_tables.long()
        contiguous[k.data_ptr()] = tuple(
            x[table].flatten(1, 2)[:, :context].transpose(1, 2).contiguous() for x in (k, v)
        )

    def run(k: Tensor, _v: Tensor) -> Tensor:
        keys, values = contiguous[k.data_ptr()]
        out = compiled(q, keys, values, block_mask=mask, scale=SCALE, enable_gqa=True)
        return out.transpose(1, 2).reshape(case.q.shape)

    return run


FORMS: dict[str, Callable[[Case], Form]] = {
    "Triton (ours)": ours,
    "FlashInfer": flashinfer,
    "FlashAttention 3 (vLLM)": vllm_flash_attention,
    "FlashAttention CuTe": flash_attention_cute,
    "FlexAttention": flex_attention,
}


def timed(case: Case, form: Form) -> list[float]:
    """Microseconds a layer, of ROUNDS rounds of a replayed graph."""

    def run() -> None:
        for k, v in case.caches:
            form(k, v)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(ROUNDS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (10 * LAYERS))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8, help="Rows a request, K + 1.")
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--contexts", default="512,2048,8192")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/attention.py needs a CUDA device")
    device = torch.device("cuda")
    facts = machine_facts(device, torch.bfloat16)
    print(machine_line(facts))
    results: list[dict[str, Any]] = []
    missing: dict[str, str] = {}
    for requests in map(int, args.batches.split(",")):
        for context in map(int, args.contexts.split(",")):
            case = make_case(requests, args.rows, context, device)
            expected = paged_attention(case.q, *case.caches[0], case.batch, SCALE)
            read = 2 * requests * context * KV_HEADS * DIM * 2
            for name, make in FORMS.items():
                if name in missing:
                    continue
                try:
                    form = make(case)
                    torch.testing.assert_close(form(*case.caches[0]), expected, atol=2e-2, rtol=2e-2)
                    times = timed(case, form)
                except Exception as error:  # not installed, or not for this card or shape: say so and go on
                    missing[name] = f"{error.__class__.__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                    continue
                step = statistics.median(times)
                results.append({"form": name, "requests": requests, "context": context, "us": times,
                                "bytes_per_second": read / step * 1e6})  # fmt: skip
    table = [["form", "requests", "context", "us a layer", "min..max", "GB/s of keys and values"]]
    for r in results:
        us = r["us"]
        table.append([r["form"], str(r["requests"]), str(r["context"]), f"{statistics.median(us):.1f}",
                      f"{min(us):.1f}..{max(us):.1f}", f"{r['bytes_per_second'] / 1e9:.0f}"])  # fmt: skip
    print(f"{HEADS} query heads, {KV_HEADS} key heads of {DIM}, {args.rows} rows a request, pages of {PAGE}, bf16\n")
    print(align(table))
    for name, why in missing.items():
        print(f"left out: {name} ({why})")
    if args.json is not None:
        write_json(args.json, {"machine": facts, "rows": args.rows, "results": results, "left_out": missing})


if __name__ == "__main__":
    main()
