"""Tiny random drafters, packs and targets for the training tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from peagle.drafter import Drafter, DrafterConfig
from peagle.target import Target
from peagle.training.chunks import Chunk, make_chunk, scale_weights
from peagle.training.eagle3 import step_weights
from peagle.training.losses import LossSettings, head_loss
from peagle.training.partition import ChunkLoss
from peagle.training.rows import RowTable, build_rows

VOCAB, HIDDEN = 61, 16


def tiny_drafter(kind: str = "p-eagle", layers: int = 1, dtype: torch.dtype = torch.float64, **over: object) -> Drafter:
    torch.manual_seed(0)
    settings: dict[str, object] = {
        "kind": kind,
        "hidden_size": HIDDEN,
        "intermediate_size": 24,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": (0, 1, 2),
        "mask_token_id": VOCAB - 1 if kind == "p-eagle" else None,
    }
    drafter = Drafter(DrafterConfig(**(settings | over))).to(dtype)  # type: ignore[arg-type]
    # buffers of the rotary embedding are made in float32 whatever the dtype; both passes share them
    drafter.bind(torch.randn(VOCAB, HIDDEN, dtype=dtype), torch.randn(VOCAB, HIDDEN, dtype=dtype))
    return drafter


@dataclass
class Pack:
    tokens: Tensor
    doc_ids: Tensor
    answers: Tensor


def tiny_pack(lengths: tuple[int, ...] = (23, 9, 31), padding: int = 5, seed: int = 0) -> Pack:
    """Packed documents with prompts of varying length, one with two answers, and padding."""
    generator = torch.Generator().manual_seed(seed)
    n = sum(lengths) + padding
    tokens = torch.randint(0, VOCAB - 1, (n,), generator=generator)
    doc_ids, answers = torch.full((n,), -1), torch.zeros(n, dtype=torch.bool)
    at = 0
    for i, length in enumerate(lengths):
        doc_ids[at : at + length] = i
        answers[at + 2 + i : at + length] = True
        if length > 20:
            answers[at + 10 : at + 13] = False  # a user turn between two answers
        at += length
    return Pack(tokens, doc_ids, answers)


def table_of(pack: Pack, kind: str, depths: int = 4, keep_rate: float = 0.8, seed: int = 0) -> RowTable:
    return build_rows(
        pack.tokens,
        pack.doc_ids,
        pack.answers,
        depths,
        keep_rate if kind == "p-eagle" else 1.0,
        torch.Generator().manual_seed(seed),
        VOCAB - 1 if kind == "p-eagle" else None,
    )


def chunks_of(
    pack: Pack, table: RowTable, kind: str, chunk_size: int, depths: int = 4, row_multiple: int = 1, **more: object
) -> list[Chunk]:
    n = table.num_anchors
    chunks = [
        make_chunk(
            table,
            start,
            min(start + chunk_size, n),
            stepwise=kind == "eagle3",
            depths=depths,
            tokens=pack.tokens,
            depth_weights=step_weights(depths) if kind == "eagle3" else None,
            row_multiple=row_multiple,
            slice_rows=16,
            **more,  # type: ignore[arg-type]
        )
        for start in range(0, n, chunk_size)
    ]
    total = sum(float(c.loss.weight.sum()) for c in chunks)
    return [scale_weights(c, 1.0 / total) for c in chunks]


def chunk_loss(drafter: Drafter, hidden: Tensor, settings: LossSettings) -> ChunkLoss:
    """Soft or hard loss against a linear teacher."""
    torch.manual_seed(5)
    teacher_head = torch.randn(VOCAB, HIDDEN, dtype=hidden.dtype)

    def loss(normed: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
        result = head_loss(normed, drafter.lm_head_weight(), chunk.loss, hidden, lambda h: h @ teacher_head.T, settings)
        return result.loss, result.stats

    return loss


def tiny_target(vocab: int = 64, layers: int = 4, seed: int = 1) -> Target:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocab,
            hidden_size=HIDDEN,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            tie_word_embeddings=False,
        )
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)  # teachers that have a clear opinion
    return Target(model, None, "tiny", frozenset({2}))


@dataclass
class ListedExample:
    input_ids: np.ndarray
    answer_mask: np.ndarray


@dataclass
class ListedAnswers:
    """A data set in memory."""

    examples: list[ListedExample]
    fingerprint: str = "listed"
    metadata: dict[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> ListedExample:
        return self.examples[index]

    def token_counts(self, vocab_size: int) -> np.ndarray:
        ids = np.concatenate([e.input_ids[e.answer_mask] for e in self.examples])
        return np.bincount(ids, minlength=vocab_size)


def listed_answers(count: int = 30, vocab: int = 64, seed: int = 0) -> ListedAnswers:
    """Documents of 8 to 40 tokens; the last id never occurs."""
    rng = np.random.default_rng(seed)
    examples = []
    for _ in range(count):
        length = int(rng.integers(8, 41))
        ids = rng.integers(3, vocab - 1, length).astype(np.int32)
        mask = np.arange(length) >= rng.integers(1, 6)
        examples.append(ListedExample(ids, mask))
    return ListedAnswers(examples)


def tile_mask(mask: object) -> Tensor:
    """[Q, K]: what a FlexAttention block mask lets through, by its key-value tiles."""
    q_len, k_len = mask.seq_lengths  # type: ignore[attr-defined]
    block = mask.BLOCK_SIZE[0]  # type: ignore[attr-defined]
    rule = mask.mask_mod(0, 0, torch.arange(q_len)[:, None], torch.arange(k_len))  # type: ignore[attr-defined]
    allowed = torch.zeros(q_len, k_len, dtype=torch.bool)
    for counts, columns, full in (
        (mask.kv_num_blocks, mask.kv_indices, False),  # type: ignore[attr-defined]
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),  # type: ignore[attr-defined]
    ):
        for row in range(counts.shape[-1]):
            for column in columns[0, 0, row, : int(counts[0, 0, row])].tolist():
                tile = slice(row * block, (row + 1) * block), slice(column * block, (column + 1) * block)
                allowed[tile] = True if full else rule[tile]
    return allowed


def flex_by_hand(q: Tensor, k: Tensor, v: Tensor, block_mask: object, enable_gqa: bool) -> Tensor:
    """FlexAttention's result with its mask materialised."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=tile_mask(block_mask), enable_gqa=enable_gqa
    )
