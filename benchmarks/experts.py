"""A layer's mixture of experts of gpt-oss-20b's size: Transformers' module, ours in bf16 and in MXFP4, and the floor.

    python benchmarks/experts.py [--rows 1,8,64,512] [--json out.json]
    python benchmarks/experts.py --rows 1 --tune [--form mxfp4]

Needs a GPU. What is timed is a replayed CUDA graph of CALLS calls, each with other random choices of experts (one row:
with experts that no other call reads), so that no cache holds what a call reads. All forms hold the same numbers, and
their outputs are compared with Transformers'. The floor is reading the experts that are chosen once, in bf16 and in
MXFP4, at the bandwidth measured in the same run. --tune tries other configurations of our kernels, one product after
the other, and prints the fastest.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_step import bandwidth
from graph_timing import replay_times
from mxfp4_weights import fill_with_mxfp4
from torch import Tensor
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from peagle.bench.json_file import check_writable, write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.kernels.experts import ExpertWeights, Product, pad_scales
from peagle.kernels.experts_triton import Config, Tile, choose_config, experts_triton
from peagle.target.fused_experts import read_experts

HIDDEN, EXPERTS, TOP_K, CALLS = 2880, 32, 4, 8
WARM_REPLAYS, ROUNDS, REPLAYS = 3, 7, 5
SHOWN = 6  # of the configurations of a product, the fastest
COMPILERS, ALPHA, LIMIT = 14, 1.702, 7.0

Call = tuple[Tensor, Tensor, Tensor]


def make_module(device: torch.device) -> Any:
    config = GptOssConfig(hidden_size=HIDDEN, intermediate_size=HIDDEN, num_local_experts=EXPERTS)
    config._experts_implementation = "grouped_mm"
    with device:
        module = GptOssExperts(config).bfloat16().requires_grad_(False)
    for bias in (module.gate_up_proj_bias, module.down_proj_bias):
        bias.normal_(0, 0.02)
    fill_with_mxfp4(module)
    return module


def in_bf16(module: Any) -> ExpertWeights:
    gate_up = module.gate_up_proj.mT.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous()
    bias = module.gate_up_proj_bias.unflatten(1, (-1, 2)).mT.flatten(1).contiguous()
    down = Product(module.down_proj.mT.contiguous(), None, module.down_proj_bias)
    return ExpertWeights(Product(gate_up, None, bias), down, module.alpha, module.limit)


def expert_bytes(weights: ExpertWeights) -> int:
    """Of one expert's weights and scales."""
    parts = [part for one in (weights.gate_up, weights.down) for part in (one.weight, one.scales) if part is not None]
    return sum(part[0].nbytes for part in parts)


def make_calls(rows: int, device: torch.device) -> list[Call]:
    """Hidden states, choices and routing weights of each call."""
    calls = []
    order = torch.randperm(EXPERTS)
    for i in range(CALLS):
        indices = torch.rand(rows, EXPERTS).topk(TOP_K, dim=-1).indices
        if rows == 1:
            indices = order[TOP_K * i : TOP_K * (i + 1)][None]
        hidden, routing = torch.randn(rows, HIDDEN), torch.rand(rows, TOP_K).softmax(dim=-1)
        calls.append((hidden.to(device).bfloat16(), indices.to(device), routing.to(device).bfloat16()))
    return calls


def touched(calls: list[Call]) -> float:
    """Different experts a call, on average."""
    return sum(len(indices.unique()) for _, indices, _ in calls) / len(calls)


def time_calls(form: Callable[[Tensor, Tensor, Tensor], Tensor], calls: list[Call]) -> tuple[list[float], Tensor]:
    """Microseconds a call, of several rounds, and the last call's output."""
    form(*calls[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = [form(*call) for call in calls][-1]
    return [us / len(calls) for us in replay_times(graph, WARM_REPLAYS, ROUNDS, REPLAYS)], out


def tiles(packed: bool, is_down: bool, rows: int) -> list[Tile]:
    """What --tune tries."""
    depths = (128, 256, 512) if packed else (64, 128, 256)
    columns = (16, 32, 64, 128) if is_down else (16, 32, 64)
    splits = (1, 2, 3, 4) if is_down and rows <= 16 else (1,)
    found = []
    for width, depth, stages, warps, split in product(columns, depths, (3, 4, 6), (4, 8), splits):
        lines = width * (1 if is_down else 2)
        a_turn = lines * depth * (0.53 if packed else 2) + rows * depth * 2
        if a_turn * stages < 200_000 and (warps == 4 or lines >= 128):
            # at least 64 lines make a product with the weight first one of Hopper's
            forms = (True, False) if lines >= 64 and rows < 64 else (False,)
            found += [Tile(width, depth, stages, warps, first, split) for first in forms]
    return found


def compile_one(job: tuple[bool, int, Config]) -> None:
    """In another process: run once over few experts, so that the compiled kernels are in Triton's cache on the disk."""
    packed, rows, config = job
    few, device = 2 * TOP_K, torch.device("cuda")

    def zeros(width: int) -> Product:
        bias = torch.zeros(few, width, dtype=torch.bfloat16, device=device)
        if not packed:
            return Product(torch.zeros(few, width, HIDDEN, dtype=torch.bfloat16, device=device), None, bias)
        blocks = torch.zeros(few, width, HIDDEN // 32, 16, dtype=torch.uint8, device=device)
        return Product(blocks, pad_scales(blocks[..., 0].contiguous()), bias)

    hidden = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device)
    indices = torch.arange(TOP_K, device=device).expand(rows, -1)
    try:
        weights = ExpertWeights(zeros(2 * HIDDEN), zeros(HIDDEN), ALPHA, LIMIT)
        experts_triton(hidden, indices, hidden[:, :TOP_K], weights, config)
        torch.cuda.synchronize()
    except Exception:  # it fails again when it is its turn, and is reported then
        return


def compile_all(packed: bool, rows: int, best: Config) -> None:
    jobs = []
    for part in ("down", "gate_up"):
        jobs += [(packed, rows, best._replace(**{part: tile})) for tile in tiles(packed, part == "down", best.rows)]
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs, chunksize=4))


def tune(weights: ExpertWeights, calls: list[Call], rows: int) -> Config:
    best = choose_config(rows, TOP_K, 2, weights)
    least = median(time_calls(partial(experts_triton, weights=weights), calls)[0])
    print(f"{rows} rows, as chosen: {least:.1f} us {best}")
    compile_all(weights.gate_up.scales is not None, rows, best)
    for part in ("down", "gate_up"):
        packed = getattr(weights, part).scales is not None
        found = []
        for tile in tiles(packed, part == "down", best.rows):
            config = best._replace(**{part: tile})
            try:
                us = median(time_calls(partial(experts_triton, weights=weights, config=config), calls)[0])
            except Exception as error:  # not for this card: say so and go on
                print(f"{part} {tuple(tile)} left out: {type(error).__name__}")
                continue
            found.append((us, config))
        for us, config in sorted(found)[:SHOWN]:
            print(f"{part} {us:.1f} us {tuple(getattr(config, part))}", flush=True)
        if found and min(found)[0] < least:
            least, best = min(found)
    print(f"best: {least:.1f} us {best}")
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,64,512")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--form", choices=("bf16", "mxfp4"), default="mxfp4", help="What --tune is about.")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.json is not None:
        check_writable(args.json)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/experts.py needs a CUDA device")
    device = torch.device("cuda")
    torch.manual_seed(0)
    facts, speed = machine_facts(device, torch.bfloat16), bandwidth(device)
    print(f"{machine_line(facts)}\nread bandwidth {speed / 1e9:.0f} GB/s")
    module = make_module(device)
    packed, plain = read_experts(module), in_bf16(module)
    assert packed is not None
    assert packed.gate_up.scales is not None
    assert packed.down.scales is not None
    if args.tune:
        for rows in map(int, args.rows.split(",")):
            tune(packed if args.form == "mxfp4" else plain, make_calls(rows, device), rows)
        return
    forms: list[tuple[str, Callable[[Tensor, Tensor, Tensor], Tensor], ExpertWeights]] = [
        ("Transformers", module, plain),
        ("ours, bf16", partial(experts_triton, weights=plain), plain),
        ("ours, MXFP4", partial(experts_triton, weights=packed), packed),
    ]
    table = [["rows", "experts", "", "us", "min..max", "floor us", "ratio", "error"]]
    results = []
    for rows in map(int, args.rows.split(",")):
        calls = make_calls(rows, device)
        expected: Tensor | None = None
        for name, form, weights in forms:
            us, out = time_calls(form, calls)
            expected = out.float() if expected is None else expected
            error = float((out.float() - expected).norm() / expected.norm())
            floor = touched(calls) * expert_bytes(weights) / speed * 1e6
            table.append(
                [str(rows), f"{touched(calls):.1f}", name, f"{median(us):.1f}", f"{min(us):.1f}..{max(us):.1f}",
                 f"{floor:.1f}", f"{median(us) / floor:.2f}", f"{error:.1e}"]
            )  # fmt: skip
            results.append({"rows": rows, "form": name, "us": us, "floor_us": floor, "relative_error": error})
            print("  ".join(table[-1]), flush=True)
            if args.json is not None:  # after every point: what was measured is kept
                write_json(args.json, {"machine": facts, "bytes_per_second": speed, "results": results})
    print(f"\n{align(table, left=3)}")


if __name__ == "__main__":
    main()
