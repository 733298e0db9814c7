"""Why the CPU path keeps weights in float16, or packs them: one decoding step's products over the number of rows.

usage: python benchmarks/cpu_linear.py [--threads 2]      prints milliseconds (median of 15) and ratios
"""

import argparse
import statistics
import time

import torch
from torch import nn

from peagle.kernels.half_linear import HalfLinear
from peagle.kernels.packed_linear import PackedLinear

# SmolLM2-135M: q with k and v, o, gate with up, down of 30 layers, and the LM head
SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576)] * 30 + [(576, 49152)]


def median_ms(arms: list[list[nn.Module]], rows: int) -> list[float]:
    """Of each arm; they take turns, so that what else runs on the machine hits all of them alike."""
    inputs = {size: torch.randn(rows, size) for size in {i for i, _ in SHAPES}}
    times: list[list[float]] = [[] for _ in arms]
    for _ in range(18):
        for layers, found in zip(arms, times, strict=True):
            start = time.perf_counter()
            for layer in layers:
                layer(inputs[layer.in_features])
            found.append(time.perf_counter() - start)
    return [statistics.median(found[3:]) * 1e3 for found in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    with torch.inference_mode():
        plain = [nn.Linear(i, o, bias=False) for i, o in SHAPES]
        packed = [PackedLinear(layer, keep_weight=False) for layer in plain]
        half = [HalfLinear(layer) for layer in plain]
        print("rows  plain ms  packed ms  ratio  float16 ms  ratio")
        for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            a, b, c = median_ms([plain, packed, half], rows)
            print(f"{rows:4}  {a:8.1f}  {b:9.1f}  {a / b:5.2f}  {c:10.1f}  {b / c:5.2f}")


if __name__ == "__main__":
    main()
