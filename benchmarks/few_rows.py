"""A decoder layer over few rows: the launches of `fused_layer` beside chains of early launches, product by product.

    python benchmarks/few_rows.py [--rows 8] [--seconds 70] [--json out.json]

Needs a GPU of compute capability 9.0. What is timed is always a whole layer of a Llama-8B's shape (products, norms,
RoPE, attention over one request's cache), replayed as one CUDA graph over as many layers' random weights as no cache
holds. Every configuration of a product is first compared with the product in float32, on fresh inputs and over memory
full of NaN; then each product in turn takes the configuration with which the layer is fastest, beginning with those
of `chain_tuning`. The floor is reading the layer's weights, keys and values once at the bandwidth measured in the same
run. The chain that is found can be given to `benchmarks/engine_step.py --chain out.json`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from engine_step import bandwidth
from few_rows_case import LAYERS, Case, check, errors_of_chain, make_case, poisoned, random, replayed
from torch import Tensor

from peagle.bench.json_file import check_writable, write_json
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.tables import align
from peagle.kernels import chain_tuning
from peagle.kernels.argmax_rows import argmax_rows_triton
from peagle.kernels.chained_layer import Chain, run_layer_chained
from peagle.kernels.fused_layer import run_layer, tune_layers
from peagle.kernels.fused_layer_triton import rms_norm_triton
from peagle.kernels.skinny_linear import CONFIGS, Config, Mode, findings, skinny

COMPILERS, TOLERANCE, VOCAB = 14, 1e-2, 128256
PREFETCH = (0, 1 << 14, 1 << 15, 1 << 16, 1 << 17, 1 << 18)  # bytes a program
ROLLS = (0, 64, 128)
FORM = ("columns", "depth", "stages", "splits", "weight_first")
SHOWN = 5  # of the points of a product, the fastest
GATED = [
    Config(64, 64, 5, 1, True), Config(64, 128, 3, 1, True), Config(64, 64, 4, 1, True), Config(32, 128, 5),
    Config(32, 128, 4), Config(16, 256, 4), Config(16, 128, 6), Config(128, 64, 4, 1, True),
]  # fmt: skip
PLAIN = [
    Config(64, 128, 8, 2, True), Config(64, 64, 8, 2, True), Config(64, 128, 4, 2, True), Config(64, 128, 4, 4, True),
    Config(64, 128, 6, 2, True), Config(64, 128, 4, 3, True), Config(64, 64, 6, 4, True), Config(64, 256, 3, 2, True),
    Config(64, 128, 6, 1, True), Config(128, 64, 5, 4, True), Config(32, 128, 5), Config(16, 256, 4),
    Config(32, 128, 5, 2), Config(32, 128, 8),
]  # fmt: skip


def name(config: Config) -> str:
    first, rolls = "w" if config.weight_first else "", f"r{config.rolls}" if config.rolls else ""
    form = f"{config.columns}{first}/{config.depth}/{config.stages}/{config.splits}"
    return f"{form} {config.prefetch >> 10}K{rolls}{f' +{config.beyond >> 10}K' if config.beyond else ''}"


def product(mode: Mode, x: Tensor, weight: Tensor, config: Config, is_early: bool) -> Tensor:
    """One product over poisoned memory, its parts added up."""
    width = len(weight) // 2 if mode == "gated" else len(weight)
    if config.splits == 1:
        return skinny(mode, x, weight, None, poisoned((len(x), width), x.dtype), config, is_early)
    out = poisoned((config.splits, len(x), width), torch.float32)
    return skinny(mode, x, weight, None, out, config, is_early).sum(0)


def compile_one(job: tuple[Mode, Config, int, bool]) -> None:
    """In another process: run once, so that the compiled kernel is in Triton's cache on the disk."""
    mode, config, rows, is_early = job
    try:
        weight = random(2 * config.columns if mode == "gated" else config.columns, 4096)
        if mode == "added":
            skinny(mode, random(rows, 4096), weight, None, random(rows, config.columns), config)
        else:
            product(mode, random(rows, 4096), weight, config, is_early)
            if is_early:  # other ways of fetching ahead are other kernels
                product(mode, random(rows, 4096), weight, config._replace(prefetch=0), is_early)
                for rolls in ROLLS[1:]:
                    product(mode, random(rows, 4096), weight, config._replace(rolls=rolls), is_early)
        torch.cuda.synchronize()
    except Exception:  # it fails again when it is its turn, and is reported then
        return


def compile_all(rows: int) -> None:
    jobs: set[tuple[Mode, Config, int, bool]] = set()
    for mode, configs in (("plain", PLAIN), ("gated", GATED)):
        # how many splits there are changes the kernel only as one or several
        jobs |= {(mode, config._replace(splits=min(2, config.splits)), rows, True) for config in configs}
    jobs |= {(mode, config, 8, False) for config in CONFIGS for mode in ("plain", "gated", "added")}
    with ProcessPoolExecutor(COMPILERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, sorted(jobs), chunksize=1))


def present(case: Case) -> Tensor:
    """The layers as they run without a chain."""
    hidden = case.x
    for weights, cache in zip(case.layers, case.caches, strict=True):
        x = rms_norm_triton(hidden, case.norm, weights.eps)
        hidden = run_layer(x, hidden, weights, case.cos, case.sin, cache, case.batch)
    return rms_norm_triton(hidden, case.norm, case.layers[0].eps)


def chained(case: Case, chain: Chain) -> Tensor:
    hidden, x = case.x, rms_norm_triton(case.x, case.norm, case.layers[0].eps)
    for weights, cache in zip(case.layers, case.caches, strict=True):
        hidden, x = run_layer_chained(x, hidden, weights, case.cos, case.sin, cache, case.batch, case.norm, chain)
    return x


class Record:
    """Writes all points whenever one has been measured, so that a run that is cut short has told what it found."""

    def __init__(self, case: Case, speed: float, facts: dict[str, Any], path: Path | None) -> None:
        self.case, self.speed, self.path = case, speed, path
        self.floor = case.num_bytes / speed * 1e6
        self.content: dict[str, Any] = {"machine": facts, "bytes_per_second": speed, "floor_us": self.floor}
        self.content |= {"rows": len(case.x), "layers": LAYERS, "points": [], "chain": [], "argmax_us": {}}

    def time(self, group: str, label: str, run: Any) -> float:
        """Microseconds a layer, the median; infinite if it cannot run."""
        try:
            us = [t / LAYERS for t in replayed(run)]
        except Exception as error:  # not for this card: say so and go on
            print(f"{group} {label} left out: {type(error).__name__} {str(error).splitlines()[:1]}")
            return float("inf")
        self.content["points"].append({"group": group, "layer": label, "us": us})
        self.write()
        return median(us)

    def table(self) -> str:
        """The fastest points of each group, in the order of the groups."""
        rows = [["layer", "", "us", "min..max", "GB/s", "ratio"]]
        groups = dict.fromkeys(point["group"] for point in self.content["points"])
        for group in groups:
            points = [point for point in self.content["points"] if point["group"] == group]
            for point in sorted(points, key=lambda point: median(point["us"]))[:SHOWN]:
                us = point["us"]
                middle = median(us)
                rows.append([group, point["layer"], f"{middle:.1f}", f"{min(us):.1f}..{max(us):.1f}",
                             f"{self.case.num_bytes / middle / 1e3:.0f}", f"{middle / self.floor:.3f}"])  # fmt: skip
        return align(rows, left=2)

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, self.content)


def correct(case: Case, rows: int) -> dict[Mode, list[Config]]:
    """The configurations that give the right product on every shape; the others are reported."""
    found: dict[Mode, list[Config]] = {}
    for mode, configs in (("plain", PLAIN), ("gated", GATED)):
        found[mode] = []
        worst = 0.0
        for config in configs:
            try:
                weights = [w for m, w in case.weights_of_first().values() if m == mode]
                forms = [partial(product, mode, config=config._replace(rolls=r), is_early=True) for r in ROLLS]
                error = max(check(mode, weight, rows, form) for weight in weights for form in forms)
            except Exception as failure:
                print(f"{mode} {name(config)} left out: {type(failure).__name__} {str(failure).splitlines()[:1]}")
                continue
            if error < TOLERANCE:  # false for NaN
                found[mode].append(config)
                worst = max(worst, error)
            else:
                print(f"{mode} {name(config)} left out: relative error {error:.2g}")
        print(f"{mode}: {len(found[mode])} of {len(configs)} configurations right, relative error to {worst:.1e}")
    return found


def entries(chain: Chain) -> list[list[Any]]:
    """A chain as engine_step.py reads it."""
    return [[*key, list(config)] for key, config in chain.configs.items()]


def find(case: Case, record: Record, right: dict[Mode, list[Config]], end: float) -> Chain:
    """The chain with which a layer is fastest, one product after the other."""
    first = chain_tuning.CANDIDATES["measured"]
    best = Chain({(mode, *w.shape): first.config(mode, w) for mode, w in case.weights_of_first().values()})
    record.content["chain"] = entries(best)
    least = record.time("chain", "measured before", lambda: chained(case, best))
    for turn in ("", " again"):  # again, because what is best for one depends on its neighbours
        for product_name, (mode, weight) in case.weights_of_first().items():
            key = (mode, *weight.shape)
            for kind in ("form", "prefetch", "beyond"):
                now = best.config(mode, weight)
                tried = [now._replace(prefetch=size, rolls=r) for size in PREFETCH for r in (ROLLS if size else (0,))]
                if kind == "form":
                    tried = [now._replace(**dict(zip(FORM, config, strict=False))) for config in right[mode]]
                elif kind == "beyond":  # only o knows what follows it
                    tried = [now._replace(beyond=size) for size in PREFETCH] if product_name == "o" else []
                for config in tried:
                    if config == now or time.perf_counter() > end:
                        continue
                    chain = replace(best, configs={**best.configs, key: config})
                    us = record.time(product_name + turn, name(config), partial(chained, case, chain))
                    if us < least:
                        least, best = us, chain
                        record.content["chain"] = entries(best)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=68, help="Start no further point after this.")
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    if args.json is not None:
        check_writable(args.json)
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/few_rows.py needs a CUDA device")
    begin = time.perf_counter()
    compile_all(args.rows)
    compiled = time.perf_counter() - begin
    device = torch.device("cuda")
    facts, speed = machine_facts(device, torch.bfloat16), bandwidth(device)
    print(f"{machine_line(facts)}\nread bandwidth {speed / 1e9:.0f} GB/s; compiled in {compiled:.0f} s")
    case = make_case(args.rows)
    record = Record(case, speed, facts, args.json)
    tune_layers(case.layers)
    choices = findings() | chain_tuning.findings()
    print("library or ours: " + "; ".join(f"{key}: {value}" for key, value in choices.items()))
    record.time("present", "", lambda: present(case))
    right = correct(case, args.rows)

    products = case.weights_of_first()
    best = find(case, record, right, begin + args.seconds)
    without = {
        (mode, *weight.shape): best.config(mode, weight)._replace(prefetch=0, beyond=0)
        for mode, weight in products.values()
    }
    record.time("chain", "best", lambda: chained(case, best))
    record.time("chain", "best, fetching nothing ahead", lambda: chained(case, Chain(without)))
    record.time("chain", "best, not early", lambda: chained(case, replace(best, is_early=False)))
    record.time("present", "again", lambda: present(case))
    error, changed = errors_of_chain(lambda: present(case), lambda: chained(case, best))
    record.content |= {"relative_error": error, "replays_that_differ": changed, "present_products": findings()}
    record.write()
    print(f"\nfloor {record.floor:.1f} us a layer, {case.num_bytes / 1e6:.0f} MB; a product is columns/depth/stages/"
          "splits and bytes ahead (+ of the next); w: weight first, r: rolls")  # fmt: skip
    print(record.table())
    print(f"chain against present: relative error {error:.1e}, {changed} of 50 replays differ from the first")
    logits = [random(args.rows, VOCAB) for _ in range(LAYERS)]
    if not all(argmax_rows_triton(x).equal(x.argmax(dim=-1)) for x in logits):
        print("argmax: ours differs from PyTorch's")
    for label, function in (("PyTorch", lambda x: x.argmax(dim=-1)), ("ours", argmax_rows_triton)):
        us = [t / LAYERS for t in replayed(lambda run=function: [run(x) for x in logits][-1])]
        print(f"argmax of {args.rows} x {VOCAB}, {label}: {median(us):.1f} us ({min(us):.1f}..{max(us):.1f})")
        record.content["argmax_us"][label] = us
    record.write()
    print("best:\n" + "\n".join(f"{key}: {config}," for key, config in best.configs.items()))
    print(f"{time.perf_counter() - begin:.0f} s")


if __name__ == "__main__":
    main()
