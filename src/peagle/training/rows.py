"""The rows of a pack: which (anchor, depth) pairs are trained, and what each reads and predicts (docs/method.md).

Depth d of an anchor keeps a row only where depth d-1 kept one, with probability `keep_rate` (conditional drop, the
position sampling of PARD, arXiv 2504.18583, that P-EAGLE uses). An anchor therefore owns a chain of depth D >= 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD_DEPTH = -1  # depth of rows that only fill up a shape: they see one row and are seen by none


@dataclass(frozen=True)
class RowTable:
    """Rows of one pack of N positions: the N depth-0 rows in order, then chain rows by anchor and depth. All [T] int64.

    Anchor and depth-0 row index are the same number. The last position of a document and padding have no next token;
    their depth-0 rows are kept as fillers (unsupervised, seen by nothing that is supervised) to keep that identity.
    """

    num_anchors: int
    anchor: Tensor  # position in the pack
    depth: Tensor  # 0 for NTP rows, 1.. for MTP rows (or EAGLE-3's later steps)
    first: Tensor  # first position of the anchor's document
    token: Tensor  # token id read
    position: Tensor  # RoPE position: position in the document + depth
    predicted: Tensor  # position in the pack of the predicted token
    teacher: Tensor  # position whose target logits predict that token
    supervised: Tensor  # bool
    chain_offsets: Tensor  # [N + 1]: chain rows before each anchor


def document_starts(doc_ids: Tensor) -> Tensor:
    """doc_ids [N] (-1 for padding) -> first position of each position's document [N]; padding stands alone."""
    n = doc_ids.shape[0]
    index = torch.arange(n)
    begins = torch.ones(n, dtype=torch.bool)
    begins[1:] = doc_ids[1:] != doc_ids[:-1]
    begins |= doc_ids < 0
    return torch.where(begins, index, 0).cummax(0).values


def supervised_depths(doc_ids: Tensor, answer_mask: Tensor, depths: int) -> Tensor:
    """[N, depths] bool: is x[p + d + 2] an answer token of p's own document, and so at every depth below d?"""
    n = doc_ids.shape[0]
    padded_docs = torch.cat((doc_ids, torch.full((depths + 1,), -2, dtype=doc_ids.dtype)))
    padded_answers = torch.cat((answer_mask, torch.zeros(depths + 1, dtype=torch.bool)))
    ok = torch.empty(n, depths, dtype=torch.bool)
    for d in range(depths):  # over depths (about ten), not anchors
        ok[:, d] = (padded_docs[d + 2 : d + 2 + n] == doc_ids) & padded_answers[d + 2 : d + 2 + n] & (doc_ids >= 0)
    return ok.to(torch.uint8).cumprod(1).bool()


def sample_depths(supervised: Tensor, keep_rate: float, generator: torch.Generator) -> Tensor:
    """supervised [N, K] (`supervised_depths`) -> chain depth D [N], 0..K-1: conditional drop of the paper."""
    n, k = supervised.shape
    coins = torch.rand(n, k - 1, generator=generator) < keep_rate
    return (supervised[:, 1:] & coins).to(torch.int64).cumprod(1).sum(1)


def build_rows(
    tokens: Tensor,
    doc_ids: Tensor,
    answer_mask: Tensor,
    depths: int,
    keep_rate: float,
    generator: torch.Generator,
    mask_token_id: int | None,
) -> RowTable:
    """Sample the rows of one pack.

    tokens, doc_ids [N] int64 (documents contiguous, padding -1), answer_mask [N] bool; `depths` is K, depth 0
    included. MTP rows read `mask_token_id`; None makes them read the true tokens x[p + 1 + depth] (EAGLE-3). All on the
    CPU; equal generators give equal tables.
    """
    n = tokens.shape[0]
    supervised = supervised_depths(doc_ids, answer_mask, depths)
    chain = sample_depths(supervised, keep_rate, generator)
    offsets = torch.zeros(n + 1, dtype=torch.int64)
    torch.cumsum(chain, 0, out=offsets[1:])
    anchors = torch.arange(n)
    chain_anchor = torch.repeat_interleave(anchors, chain)
    chain_depth = torch.arange(chain_anchor.shape[0]) - offsets[chain_anchor] + 1
    anchor = torch.cat((anchors, chain_anchor))
    depth = torch.cat((torch.zeros_like(anchors), chain_depth))
    first = document_starts(doc_ids)[anchor]
    last = n - 1
    token = tokens[(anchor + depth + 1).clamp(max=last)]
    if mask_token_id is not None:
        token[n:] = mask_token_id
    return RowTable(
        num_anchors=n,
        anchor=anchor,
        depth=depth,
        first=first,
        token=token,
        position=anchor - first + depth,
        predicted=(anchor + depth + 2).clamp(max=last),
        teacher=(anchor + depth + 1).clamp(max=last),
        supervised=torch.cat((supervised[:, 0], torch.ones(chain_anchor.shape[0], dtype=torch.bool))),
        chain_offsets=offsets,
    )
