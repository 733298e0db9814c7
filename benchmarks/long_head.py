"""The head of an 8B target, its optimizer and its rows, for the benchmarks of long sequences."""

from __future__ import annotations

from collections.abc import Callable

import torch
from long_common import Shape
from torch import Tensor

from peagle.drafter import Drafter, DrafterConfig
from peagle.training.attention import BLOCK, choose_backend
from peagle.training.chunks import Chunk, make_chunk, round_up, scale_weights, to_device
from peagle.training.fuse import fuse_elementwise
from peagle.training.losses import LossSettings, head_loss
from peagle.training.memory import choose_loss_rows
from peagle.training.precision import ComputeCopy
from peagle.training.rows import RowTable, build_rows


class Training:
    """A head with its optimizer, and a target of which only embeddings and LM head exist."""

    def __init__(self, shape: Shape, device: torch.device, attention: str = "auto") -> None:
        self.shape, self.device = shape, device
        cuda = device.type == "cuda"
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.backend = choose_backend(attention, device, self.dtype, shape.head_dim)
        config = DrafterConfig(
            kind="p-eagle", hidden_size=shape.hidden, intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim, vocab_size=shape.vocab, draft_vocab_size=shape.draft_vocab,
            aux_hidden_state_layer_ids=(2, 16, 29), mask_token_id=shape.vocab - 1, own_lm_head=True,
            max_position_embeddings=1 << 20, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            self.drafter = Drafter(config)
            assert self.drafter.lm_head is not None
            self.drafter.lm_head.weight.requires_grad_(False)  # as `peagle train` leaves it
            self.copy = ComputeCopy(self.drafter, self.dtype)
            self.head = torch.randn(shape.vocab, shape.hidden, dtype=self.dtype) / shape.hidden**0.5
            self.copy.bind(torch.randn(shape.vocab, shape.hidden, dtype=self.dtype), self.head)
        if cuda:
            fuse_elementwise(self.copy.compute)
        self.parameters = [p for p in self.drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=cuda)
        self.loss_rows = choose_loss_rows(shape.vocab, shape.draft_vocab, device, self.dtype.itemsize, 1 << 36)
        self.loss = LossSettings(
            kind="soft",
            depths=shape.depths,
            kernel="triton" if cuda else "plain",
            target_ids=torch.arange(shape.draft_vocab, device=device),
        )

    def states(self, length: int) -> tuple[Tensor, Tensor]:
        """Random auxiliary states [N, 3H] and hidden states [N, H]."""
        make = lambda width: torch.randn(length, width, dtype=self.dtype, device=self.device)  # noqa: E731
        return make(3 * self.shape.hidden), make(self.shape.hidden)

    def chunk_loss(self, hidden: Tensor) -> Callable[[Tensor, Chunk], tuple[Tensor, Tensor]]:
        def loss(normed: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor]:
            teacher = lambda rows: rows @ self.head.T  # noqa: E731
            result = head_loss(normed, self.copy.compute.lm_head_weight(), chunk.loss, hidden, teacher, self.loss)
            return result.loss, result.stats

        return loss

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.copy.refresh()

    def forget(self) -> None:
        for module in (self.drafter, self.copy.compute):
            module.zero_grad(set_to_none=True)


def sampled_rows(shape: Shape, length: int, keep_rate: float) -> RowTable:
    """Rows of one document that fills the pack; everything but its first token is an answer."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab - 1, (length,), generator=generator)
    answers = torch.arange(length) > 0
    documents = torch.zeros(length, dtype=torch.int64)
    return build_rows(tokens, documents, answers, shape.depths, keep_rate, generator, shape.vocab - 1)


def make_chunks(training: Training, table: RowTable, size: int) -> list[Chunk]:
    """Chunks of `size` anchors, all of one number of rows, so that the length compiles once."""
    n = table.num_anchors
    cuts = torch.tensor([*range(0, n, size), n])
    multiple = 1
    if training.backend != "dense":
        multiple = round_up(int(table.chain_offsets[cuts].diff().max()) + size, BLOCK) - size
    chunks = [
        make_chunk(
            table, start, min(start + size, n), stepwise=False, depths=training.shape.depths,
            tokens=torch.zeros(n, dtype=torch.int64), row_multiple=multiple, slice_rows=training.loss_rows,
            loss_multiple=BLOCK if training.device.type == "cuda" else 1,
        )
        for start in range(0, n, size)
    ]  # fmt: skip
    total = sum(float(chunk.loss.weight.sum()) for chunk in chunks)
    return [to_device(scale_weights(chunk, 1.0 / total), training.device) for chunk in chunks]
