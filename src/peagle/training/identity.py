"""What a head, and the states that it learns from, are made for."""

from __future__ import annotations

import hashlib

import torch

from peagle.target.loading import target_fingerprint
from peagle.target.model import Target


def target_identity(target: Target) -> str:
    """A short hash of what a head is trained for: tokenizer, dimensions and a sample of the weights."""
    digest = hashlib.sha256(target_fingerprint(target).encode())
    digest.update(f"{target.hidden_size} {target.num_layers}".encode())
    for weight in (target.embed_weight, target.lm_head_weight):
        sample = weight[:: max(1, len(weight) // 16)].detach().to("cpu", torch.bfloat16)  # the same in any load dtype
        digest.update(sample.float().numpy().tobytes())
    return digest.hexdigest()[:16]
