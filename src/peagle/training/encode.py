"""The target's states for the packs of a step, online."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle.target.model import Target
from peagle.training.encode_groups import EncodeGroup


@torch.no_grad()
def encode_packs(
    target: Target,
    groups: Sequence[EncodeGroup],
    positions: int,
    aux_layer_ids: Sequence[int],
    dtype: torch.dtype,
    into: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Auxiliary states [positions, 3H] and LM-head inputs [positions, H] of packs laid end to end; zeros in padding.

    `dtype`: of the auxiliary states (the drafter's compute dtype). Hidden states keep the target's. `into`: such states
    of other documents, which these are added to in place.
    """
    if into is None:
        width = target.hidden_size
        aux = torch.zeros(positions, len(aux_layer_ids) * width, dtype=dtype, device=target.device)
        into = aux, torch.zeros(positions, width, dtype=target.dtype, device=target.device)
    aux, hidden = into
    for group in groups:
        states = target.encode(group.ids, aux_layer_ids)
        aux[group.place] = states.aux.flatten(0, 1)[group.source].to(dtype)
        hidden[group.place] = states.hidden.flatten(0, 1)[group.source].to(target.dtype)
    return aux, hidden


def call_overhead(target: Target) -> int:
    """What one more call of the target costs on a GPU, in tokens: its launches against the tokens of that time.

    About 150 us a layer and 300 TFLOP/s: 5000 tokens for SmolLM2-135M, 90 for an 8B model.
    """
    size = sum(p.numel() for p in target.decoder.parameters())
    return int(min(max(150e-6 * target.num_layers * 300e12 / (2 * size), 64), 32768))
