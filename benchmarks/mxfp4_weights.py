"""Random weights of mixtures of experts that MXFP4 holds exactly, as a dequantised checkpoint's are."""

from __future__ import annotations

import torch
from torch import nn

from peagle.kernels.mxfp4 import unpack_mxfp4

SCALE = 120  # 2^-7, which gives weights of a standard deviation of 0.02, as models are initialised with


@torch.no_grad()
def fill_with_mxfp4(module: nn.Module) -> int:
    """Of every mixture below a module, an expert at a time; returns how many mixtures there are."""
    count = 0
    for mixture in module.modules():
        if not hasattr(mixture, "is_transposed"):
            continue
        count += 1
        for weight in (mixture.gate_up_proj, mixture.down_proj):
            rows = weight.mT if mixture.is_transposed else weight
            for expert in rows:
                height, depth = expert.shape
                device = weight.device
                blocks = torch.randint(0, 256, (height, depth // 32, 16), dtype=torch.uint8, device=device)
                scales = torch.full((height, depth // 32), SCALE, dtype=torch.uint8, device=device)
                expert.copy_(unpack_mxfp4(blocks, scales, weight.dtype))
    return count
