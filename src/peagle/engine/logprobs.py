"""logprobs and prompt_logprobs: the model's own distribution (vLLM's `raw_logprobs`), before anything changes it.

The chosen token's entry comes first, then the likeliest ones. Ids and numbers travel as one int64 tensor, so that they
reach the host in the one copy that fetches a step's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from peagle.engine.outputs import Logprob, PositionLogprobs
from peagle.engine.plan import TokenLogprobs
from peagle.engine.token_bytes import partial_bytes

ROWS_AT_ONCE = 64  # how many rows of float32 probabilities exist at a time


@dataclass(slots=True)
class ReportRows:
    """m rows of the logits to report on. token_index [m]: where in the flat token buffer the token stands that each
    predicts; None when that is the token chosen from the row. owners, num_top [m], on the host: the request's index in
    the plan, and how many of the likeliest tokens it wants."""

    rows: Tensor
    token_index: Tensor | None
    owners: NDArray[np.int64]
    num_top: NDArray[np.int64]

    @property
    def width(self) -> int:
        """Columns of the packed report: own id, likeliest ids, rank, own logprob, likeliest logprobs."""
        return 2 * int(self.num_top.max()) + 3


def pack_logprobs(raw: Tensor, token_ids: Tensor, num_top: int) -> Tensor:
    """Logits [m, V] and one token a row [m] -> int64 [m, 2 * num_top + 3]."""
    packed = []
    for logits, tokens in zip(raw.split(ROWS_AT_ONCE), token_ids.split(ROWS_AT_ONCE), strict=True):
        logprobs = logits.float().log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[:, None])
        rank = (logprobs >= own).sum(dim=-1, keepdim=True)
        values, ids = logprobs.topk(num_top, dim=-1)
        numbers = torch.cat((own, values), dim=1).double().view(torch.int64)
        packed.append(torch.cat((tokens[:, None], ids, rank, numbers), dim=1))
    return torch.cat(packed)


def unpack_logprobs(packed: NDArray[np.int64], report: ReportRows) -> Iterator[tuple[int, TokenLogprobs]]:
    """(index in the plan, report) of each row, cut to the number that its request wants."""
    most = int(report.num_top.max())
    packed = packed.reshape(-1, report.width)
    ids, ranks = packed[:, : most + 1].tolist(), packed[:, most + 1].tolist()
    numbers = np.ascontiguousarray(packed[:, most + 2 :]).view(np.float64).tolist()
    for row, (owner, n) in enumerate(zip(report.owners.tolist(), report.num_top.tolist(), strict=True)):
        yield owner, TokenLogprobs(ids[row][: n + 1], numbers[row][: n + 1], ranks[row])


class TokenNames:
    """Reports in vLLM's shape, with the tokens' texts where there is a tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str | None, bytes | None]] = {}

    def report(self, report: TokenLogprobs) -> PositionLogprobs:
        """The token itself first, then the likeliest, which have their ranks by order."""
        ids, values = report.token_ids, report.logprobs
        found = {ids[0]: Logprob(values[0], report.rank, *self._name(ids[0]))}
        for rank, (token, logprob) in enumerate(zip(ids[1:], values[1:], strict=True), 1):
            found[token] = Logprob(logprob, rank, *self._name(token))
        return found

    def _name(self, token: int) -> tuple[str | None, bytes | None]:
        if self._tokenizer is None:
            return None, None
        if token not in self._known:
            text = str(self._tokenizer.decode([token]))
            self._known[token] = text, partial_bytes(self._tokenizer, token, text)
        return self._known[token]
