"""Why the CPU path packs its linears, and halves a drafter's: one decoding step's products over the number of rows.

usage: python benchmarks/cpu_linear.py [--threads 2]      prints milliseconds (median of 15) and ratios
"""

import argparse
import statistics
import time

import torch
from torch import nn

from peagle.kernels.half_linear import HalfLinear
from peagle.kernels.packed_linear import PackedLinear

# SmolLM2-135M: q, k, v, o, gate, up, down of 30 layers, and the LM head
SHAPES = [(576, 576), (576, 192), (576, 192), (576, 576), (576, 1536), (576, 1536), (1536, 576)] * 30 + [(576, 49152)]


def median_ms(layers: list[nn.Module], rows: int) -> float:
    inputs = {size: torch.randn(rows, size) for size in {i for i, _ in SHAPES}}
    times = []
    for _ in range(18):
        start = time.perf_counter()
        for layer in layers:
            layer(inputs[layer.in_features])
        times.append(time.perf_counter() - start)
    return statistics.median(times[3:]) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    with torch.inference_mode():
        plain = [nn.Linear(i, o, bias=False) for i, o in SHAPES]
        packed = [PackedLinear(layer, keep_weight=False) for layer in plain]
        half = [HalfLinear(layer) for layer in plain]
        print("rows  plain ms  packed ms  ratio  float16 ms  ratio")
        for rows in (1, 2, 4, 8, 16, 32, 64, 256):
            a, b, c = (median_ms(layers, rows) for layers in (plain, packed, half))
            print(f"{rows:4}  {a:8.1f}  {b:9.1f}  {a / b:5.2f}  {c:10.1f}  {b / c:5.2f}")


if __name__ == "__main__":
    main()
