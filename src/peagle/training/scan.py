"""One look at every document before training: which can train, how long they are, and which of them validate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from peagle.errors import InputError


class Example(Protocol):
    @property
    def input_ids(self) -> np.ndarray: ...
    @property
    def answer_mask(self) -> np.ndarray: ...


class Answers(Protocol):
    """What training needs of a data set (`peagle.data.dataset.AnswerDataset`)."""

    fingerprint: str

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Example: ...
    def token_counts(self, vocab_size: int) -> np.ndarray: ...


@dataclass(frozen=True)
class Scan:
    """What one look at every document found."""

    documents: np.ndarray  # indices that can train
    lengths: np.ndarray  # their lengths after truncation
    seen: np.ndarray  # [V] bool: token ids that occur anywhere, prompts included
    truncated: int
    skipped_short: int
    skipped_unsupervised: int

    def without(self, documents: Sequence[int]) -> Scan:
        """A copy that lacks some documents. Raises InputError when none is left."""
        keep = ~np.isin(self.documents, documents)
        if not keep.any():
            raise InputError("data: no document is left to learn from")
        return replace(self, documents=self.documents[keep], lengths=self.lengths[keep])

    def summary(self) -> str:
        return (
            f"{len(self.documents)} documents, {int(self.lengths.sum())} tokens; {self.truncated} truncated, "
            f"skipped: {self.skipped_short} shorter than 2 tokens, {self.skipped_unsupervised} without an answer token "
            "to predict"
        )


def scan_answers(answers: Answers, pack_length: int, vocab_size: int) -> Scan:
    """Look at every document once. Raises InputError for ids outside the vocabulary or when nothing can train."""
    documents, lengths = [], []
    seen = np.zeros(vocab_size, dtype=bool)
    truncated = short = unsupervised = 0
    for i in range(len(answers)):
        example = answers[i]
        ids = example.input_ids
        if len(ids) and (int(ids.max()) >= vocab_size or int(ids.min()) < 0):
            raise InputError(f"data: document {i} holds token id {int(ids.max())}, expected 0 to {vocab_size - 1}")
        seen[ids] = True
        if len(ids) < 2:
            short += 1
        elif not example.answer_mask[2:pack_length].any():
            unsupervised += 1
        else:
            truncated += len(ids) > pack_length
            documents.append(i)
            lengths.append(min(len(ids), pack_length))
    if not documents:
        raise InputError(f"data: none of {len(answers)} documents has an answer token to learn from")
    return Scan(np.array(documents), np.array(lengths), seen, truncated, short, unsupervised)


def split_validation(scan: Scan, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Indices into `scan.documents`: (train, validation); `count` documents, at most a tenth, validate."""
    order = np.random.default_rng([seed, 7]).permutation(len(scan.documents))
    held = min(count, len(order) // 10)
    return np.sort(order[held:]), np.sort(order[:held])
