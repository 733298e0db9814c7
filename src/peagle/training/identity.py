"""What a head, and the states that it learns from, are made for."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from peagle.target.loading import target_fingerprint
from peagle.target.model import Target

SAMPLED = 16  # places of each weight of a layer


def target_identity(target: Target) -> str:
    """A short hash of tokenizer, dimensions and a sample of embeddings and LM head: what is there without layers."""
    digest = hashlib.sha256(target_fingerprint(target).encode())
    digest.update(f"{target.hidden_size} {target.num_layers}".encode())
    for weight in (target.embed_weight, target.lm_head_weight):
        digest.update(_bytes(weight[:: max(1, len(weight) // 16)]))
    return digest.hexdigest()[:16]


def full_identity(target: Target) -> str:
    """`target_identity` and, behind a dash, a hash of a sample of every decoder layer's weights.

    Without the second one where the layers are not loaded, offloaded, in shards, or quantised (each device holds those
    otherwise).
    """
    weights = dict(target.layers.named_parameters())
    if not weights or any(isinstance(w, DTensor) or w.is_meta or w.dtype.itemsize < 2 for w in weights.values()):
        return target_identity(target)
    digest = hashlib.sha256()
    for name in sorted(weights):
        weight = weights[name]
        places = torch.arange(SAMPLED) * weight.numel() // SAMPLED
        digest.update(_bytes(weight[torch.unravel_index(places, weight.shape)]))  # flattening may copy all of it
    return f"{target_identity(target)}-{digest.hexdigest()[:16]}"


def same_target(identity: str, other: str) -> bool:
    """Whether two full identities are of one target, as far as both go: those of earlier versions have no layers."""
    (head, _, layers), (other_head, _, other_layers) = identity.partition("-"), other.partition("-")
    return head == other_head and (layers == other_layers or not layers or not other_layers)


def _bytes(weight: Tensor) -> bytes:
    """Of its values in bfloat16: the same in any load dtype."""
    return weight.detach().to("cpu", torch.bfloat16).float().numpy().tobytes()
