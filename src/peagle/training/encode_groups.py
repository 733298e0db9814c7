"""Documents that the target reads in one call: of similar length, right-padded, their tokens' places in the packs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from peagle.training.chunks import round_up


@dataclass(frozen=True)
class EncodeGroup:
    """Documents that the target reads in one call: ids [B, L] right-padded; their tokens' places."""

    ids: Tensor
    source: Tensor  # [S] positions in the flattened ids
    place: Tensor  # [S] positions in the step's packs laid end to end
    row_starts: tuple[int, ...]  # place of each document's first token

    def to(self, device: torch.device) -> EncodeGroup:
        """A copy on the device, asynchronously where it is pinned."""
        ids, source, place = (x.to(device, non_blocking=True) for x in (self.ids, self.source, self.place))
        return replace(self, ids=ids, source=source, place=place)

    def only(self, starts: Collection[int], origin: int = 0) -> EncodeGroup | None:
        """The documents whose first tokens lie at `starts`, places counted from `origin`; None when there are none."""
        rows = [i for i, at in enumerate(self.row_starts) if at in starts]
        if not rows:
            return None
        row_starts = tuple(self.row_starts[i] - origin for i in rows)
        if len(rows) == len(self.row_starts):
            return replace(self, place=self.place - origin, row_starts=row_starts) if origin else self
        width = self.ids.shape[1]
        renumber = torch.full((len(self.row_starts),), -1, dtype=torch.int64)
        renumber[rows] = torch.arange(len(rows))
        row = renumber.to(self.source.device)[self.source // width]
        chosen = row >= 0
        source = row[chosen] * width + self.source[chosen] % width
        return EncodeGroup(self.ids[rows], source, self.place[chosen] - origin, row_starts)


def group_spans(
    spans: list[tuple[np.ndarray, int]], most_tokens: int, overhead: int, multiple: int = 1
) -> list[EncodeGroup]:
    """Group documents (ids, place) of similar length: one more call to the target against the padding it saves.

    most_tokens: padded tokens of a call; overhead: what one more call costs, in tokens; padded lengths are multiples of
    `multiple`.
    """
    spans = sorted(spans, key=lambda span: -len(span[0]))
    groups: list[EncodeGroup] = []
    if not spans:
        return groups
    current: list[tuple[np.ndarray, int]] = []
    waste = width = 0
    for span in spans:
        loss = width - len(span[0])
        full = (len(current) + 1) * width > most_tokens
        if current and (full or waste + loss > overhead):
            groups.append(_encode_group(current, width))
            current, waste = [], 0
        if not current:
            width, loss = round_up(len(span[0]), multiple), 0
        current.append(span)
        waste += loss
    groups.append(_encode_group(current, width))
    return groups


def _encode_group(spans: list[tuple[np.ndarray, int]], width: int) -> EncodeGroup:
    ids = np.zeros((len(spans), width), dtype=np.int64)
    source, place = [], []
    for row, (tokens, at) in enumerate(spans):
        ids[row, : len(tokens)] = tokens
        source.append(np.arange(row * width, row * width + len(tokens)))
        place.append(np.arange(at, at + len(tokens)))
    return EncodeGroup(
        torch.from_numpy(ids),
        torch.from_numpy(np.concatenate(source)),
        torch.from_numpy(np.concatenate(place)),
        tuple(at for _, at in spans),
    )
