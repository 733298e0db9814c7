"""The tokens that a drafter chooses from on a CPU: the frequent ones of the target's answers, and those of the texts.

Every draft reads the whole LM head, which on a CPU takes as long as all of the drafter's layers, though a quarter of
its rows make 99 % of what is written. What else a text needs, names above all, has mostly stood in it before. So a
draft is chosen from a list of frequent tokens that comes with the head, and from the latest others that have been seen.
Drafts are proposals: the list decides how many are accepted and never what is written.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from peagle.errors import InputError

FILE = "draft_vocabulary.json"  # beside a head's config.json; other readers of heads leave it alone
COVERAGE = 0.99  # share of the answers' tokens that the listed ones make
ROUND_TO = 64  # as many tokens at a time: what `argmax_rows` looks through
RECENT = 256  # tokens seen in texts beside the listed ones


class DraftVocabulary:
    """The rows of an LM head that drafts are chosen by.

    ids [N + M]: target ids of the N listed tokens, ascending, then of the M latest others (to begin with, any).
    """

    def __init__(self, listed: Tensor, weight: Tensor, product: Callable[[Tensor], Callable[[Tensor], Tensor]]) -> None:
        """listed [N]: ascending, fewer than the vocabulary has. weight [V, H]: the whole LM head. product: what makes
        of rows of it what computes their logits."""
        self.weight = weight
        self.product = product(weight[listed])
        self._known = np.zeros(len(weight), dtype=np.bool_)
        self._known[listed.numpy()] = True
        others = torch.from_numpy(np.flatnonzero(~self._known)[:RECENT])
        self._known[others.numpy()] = True
        self.ids = torch.cat((listed, others))
        self.recent, self.recent_rows = self.ids[len(listed) :], weight[others]
        self._oldest = 0

    def see(self, token_ids: NDArray[np.int64]) -> None:
        """Take tokens [T] of a text in, in the place of those that were taken in first."""
        new = token_ids[~self._known[token_ids]]
        if len(new) == 0:
            return
        latest = list(dict.fromkeys(new[::-1].tolist()))[: len(self.recent)]  # where there are too many
        ids = np.array(latest[::-1])
        places = (self._oldest + np.arange(len(ids))) % len(self.recent)
        self._oldest = (self._oldest + len(ids)) % len(self.recent)
        recent = self.recent.numpy()
        self._known[recent[places]] = False
        self._known[ids] = True
        recent[places] = ids
        self.recent_rows[torch.from_numpy(places)] = self.weight[torch.from_numpy(ids)]

    def logits(self, normed: Tensor) -> Tensor:
        """Rows [T, H] -> logits [T, N + M] of `ids`."""
        # this way round the few rows take half as long as as a linear layer
        return torch.cat((self.product(normed), (self.recent_rows @ normed.t()).t()), dim=-1)


def frequent_tokens(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """The ids to list, ascending, from how often each token [V] occurs in answers: the most frequent that make
    `COVERAGE` of all, their number rounded up, without those that never occur."""
    order = np.argsort(-counts, kind="stable")
    reached = np.cumsum(counts[order])
    enough = int(np.searchsorted(reached, COVERAGE * reached[-1])) + 1
    return np.sort(order[: min(-(-enough // ROUND_TO) * ROUND_TO, int(np.count_nonzero(counts)))])


def write_draft_vocabulary(folder: Path, counts: NDArray[np.int64]) -> int:
    """Write the list into a head's folder, a bit for each token of the vocabulary; returns how many it names.

    counts [V]: how often each token occurs in answers. Raises InputError when none does or the file cannot be written.
    """
    if not counts.any():
        raise InputError("answers: hold no token, expected some to count")
    ids = frequent_tokens(counts)
    listed = np.zeros(len(counts), dtype=np.bool_)
    listed[ids] = True
    content = {
        "vocab_size": len(counts),
        "listed": len(ids),
        "answer_tokens": int(counts.sum()),
        "coverage": round(float(counts[ids].sum() / counts.sum()), 4),
        "bits": base64.b64encode(np.packbits(listed, bitorder="little").tobytes()).decode(),
    }
    work = folder / f".{FILE}"
    try:
        work.write_text(json.dumps(content, indent=2) + "\n")
        work.replace(folder / FILE)
    except OSError as error:
        raise InputError(f"output: {folder / FILE} cannot be written ({error.strerror or error})") from error
    return len(ids)


def read_draft_vocabulary(folder: Path, vocab_size: int) -> Tensor | None:
    """The token ids [N] that a head's folder lists, ascending; None where it has no list. Raises InputError for one
    that cannot be read or is of another vocabulary."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        size, count = content["vocab_size"], content["listed"]
        bits = np.frombuffer(base64.b64decode(content["bits"], validate=True), dtype=np.uint8)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"head: {path} cannot be read ({error.__class__.__name__}: {error})") from error
    if size != vocab_size:
        raise InputError(f"vocab_size: got {size} in {path}, expected the target's {vocab_size}")
    ids = np.flatnonzero(np.unpackbits(bits, bitorder="little"))
    if len(ids) == 0 or len(ids) != count or ids[-1] >= vocab_size:
        raise InputError(
            f"bits: {path} lists {len(ids)} tokens up to {ids.max(initial=-1)}, expected {count}, each below "
            f"{vocab_size}"
        )
    return torch.from_numpy(ids)
