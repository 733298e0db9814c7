"""A reduced draft vocabulary: the target's tokens that occur most in the training answers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from peagle.errors import InputError


@dataclass(frozen=True)
class DraftVocab:
    """target_ids [Vd] ascending; d2t [Vd] offsets (target id = i + d2t[i]); t2d [V] bool; coverage: share of answer
    tokens that the draft vocabulary can predict."""

    target_ids: Tensor
    d2t: Tensor
    t2d: Tensor
    coverage: float

    def draft_ids(self) -> Tensor:
        """[V] int64: draft id of each target id, -1 outside."""
        ids = torch.full((len(self.t2d),), -1, dtype=torch.int64)
        ids[self.target_ids] = torch.arange(len(self.target_ids))
        return ids


def choose_draft_vocab(counts: np.ndarray, size: int) -> DraftVocab:
    """The `size` most frequent ids of counts [V] (answer tokens; lower ids first among equals)."""
    vocab_size = len(counts)
    if not 0 < size <= vocab_size:
        raise InputError(f"draft_vocab_size: got {size}, expected 1 to {vocab_size}")
    ids = np.sort(np.argsort(-counts, kind="stable")[:size])
    target_ids = torch.from_numpy(ids.astype(np.int64))
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[target_ids] = True
    total = int(counts.sum())
    coverage = float(counts[ids].sum() / total) if total else 0.0
    return DraftVocab(target_ids, target_ids - torch.arange(size), t2d, coverage)
