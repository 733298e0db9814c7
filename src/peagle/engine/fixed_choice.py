"""Choosing tokens in fixed shapes, as CUDA graphs need it: every row goes the way that some row of the batch needs."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.engine.argmax import argmax_rows
from peagle.engine.lanes import Lanes
from peagle.engine.race import race_keys, race_rows
from peagle.engine.sampler import sample_filtered

# How a batch's tokens are chosen, one graph each: by argmax alone, by temperature, by top-k, top-p and min-p too.
GREEDY, SAMPLED, FILTERED = 0, 1, 2


def way_of(lanes: Lanes, lane: NDArray[np.int64]) -> int:
    """The way that a batch of these lanes goes."""
    sampled = lanes.temperature[lane] > 0
    if not sampled.any():
        return GREEDY
    return FILTERED if (sampled & lanes.filtered[lane]).any() else SAMPLED


def settings_of(lanes: Lanes, lane: NDArray[np.int64], size: int) -> NDArray[np.float32]:
    """Temperature (0: greedy), top-p and min-p of the lanes, padded: [3, size]."""
    settings = np.zeros((3, size), dtype=np.float32)
    settings[:, : len(lane)] = lanes.temperature[lane], lanes.top_p[lane], lanes.min_p[lane]
    return settings


def choose_fixed(logits: Tensor, way: int, settings: Tensor, top_k: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """The target's choice of every row, as `sampler.choose` makes it: logits [B * (K + 1), V] -> [B * (K + 1)].

    settings [3, B] as in `settings_of`; top_k, seed [B]; positions [B, K + 1] of the rows, behind which the chosen
    tokens will stand.
    """
    choices = argmax_rows(logits)
    if way == GREEDY:
        return choices

    def rows(setting: Tensor) -> Tensor:
        return setting[:, None].expand(positions.shape).flatten()

    temperature, top_p, min_p = map(rows, settings)
    top_k, keys = rows(top_k), race_keys(rows(seed), positions.flatten() + 1)
    warmth = torch.where(temperature > 0, temperature, 1.0)
    drawn = race_rows(logits, warmth, keys)
    if way == FILTERED:
        filtered = (top_k > 0) | (top_p < 1) | (min_p > 0)
        scaled = logits.float() / warmth[:, None]
        drawn = torch.where(filtered, sample_filtered(scaled, top_k, top_p, keys, min_p), drawn)
    return torch.where(temperature > 0, drawn, choices)
