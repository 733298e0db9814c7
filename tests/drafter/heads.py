"""Small random heads for the tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from peagle.drafter import Drafter, DrafterConfig

VOCAB, HIDDEN = 60, 32

BASE = {
    "kind": "p-eagle",
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "aux_hidden_state_layer_ids": (2, 3, 5),
    "max_position_embeddings": 512,
    "mask_token_id": 59,
    "k_train": 8,
}


def make_config(**changes: object) -> DrafterConfig:
    values = BASE | changes
    if values["kind"] == "eagle3" and "mask_token_id" not in changes:
        values["mask_token_id"] = None
    return DrafterConfig(**values)  # type: ignore[arg-type]


@torch.no_grad()
def make_drafter(seed: int = 0, **changes: object) -> Drafter:
    """Random weights, norms away from one, and for a reduced vocabulary every second or third target id."""
    torch.manual_seed(seed)
    drafter = Drafter(make_config(**changes))
    for parameter in drafter.parameters():
        if parameter.dim() == 1:
            parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
        else:
            parameter.copy_(torch.randn(parameter.shape) * (1.5 / parameter.shape[-1] ** 0.5))
    if drafter.mask_hidden is not None:
        drafter.mask_hidden.normal_()
    if drafter.d2t is not None:
        size = drafter.config.draft_vocab_size
        ids = torch.randperm(VOCAB)[:size].sort().values
        drafter.d2t.copy_(ids - torch.arange(size))
    return drafter.eval()


def make_target_tensors(seed: int = 9) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings and LM head of a pretended target, both [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(VOCAB, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)


def causal_attend(mask: torch.Tensor):
    """Dense attention with a mask [T, T] (True: seen), as the `attend` of a forward."""

    def attend(_layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / q.shape[-1] ** 0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, v)

    return attend


def edit_config(folder: Path, **changes: object) -> None:
    """Change keys of config.json; a value of None takes the key away."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the dict of tensors of model.safetensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
