"""Start a run from the weights of a head that exists: to train it longer, or on other data."""

from __future__ import annotations

from dataclasses import replace

import torch

from peagle.drafter.config import DrafterConfig
from peagle.drafter.loading import load_drafter, read_config, resolve_head
from peagle.drafter.model import Drafter
from peagle.errors import InputError

# may differ: no weight depends on them
FREE = ("dtype", "k_train", "max_train_length", "draft_window", "max_position_embeddings")


def mask_token_of(path: str) -> int | None:
    """The mask token that a head was trained with; its row of the embeddings has no meaning to keep, its id does."""
    return read_config(resolve_head(path)).mask_token_id


def with_conventions_of(config: DrafterConfig, path: str) -> DrafterConfig:
    """`config` with the RoPE and the norms' epsilon of the head at `path`: its weights were trained with them, and no
    setting names them."""
    head = read_config(resolve_head(path))
    return replace(config, rope_parameters=head.rope_parameters, rms_norm_eps=head.rms_norm_eps)


@torch.no_grad()
def copy_head(drafter: Drafter, path: str) -> str:
    """Copy every weight of the head at `path` (folder or Hub id) into `drafter`; returns what was done.

    Raises InputError, listing every difference, when the head is not of the drafter's kind and dimensions.
    """
    head = load_drafter(path, dtype=torch.float32)  # of another kind: listed below
    unnamed = not head.config.aux_hidden_state_layer_ids  # then they are this run's, vLLM's default unless it says
    wanted, found = drafter.config.to_dict(), head.config.to_dict()
    differences = [
        f"{name}: {wanted[name]!r}, the head has {found[name]!r}"
        for name in wanted
        if name not in FREE and wanted[name] != found[name] and not (unnamed and name == "aux_hidden_state_layer_ids")
    ]
    own, its = drafter.d2t, head.d2t
    if not differences and own is not None and its is not None and not torch.equal(own.cpu(), its.cpu()):
        differences.append("draft vocabulary: the data's most frequent tokens are not the head's")
    if differences:
        raise InputError(f"init: the head {path} does not fit these settings ({'; '.join(differences)})")
    drafter.load_state_dict(head.state_dict())
    said = f", which names no auxiliary layers: {list(drafter.config.aux_hidden_state_layer_ids)} are read"
    return f"init: copied the head {path}{said if unnamed else ''}"
