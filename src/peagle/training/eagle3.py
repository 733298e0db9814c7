"""EAGLE-3's training-time test (arXiv 2503.01840, section 3.2): each step reads what the step before it produced.

Row (p, s) reads the token x[p + 1 + s] and, as its hidden input, the feedback of (p, s - 1); its RoPE position is
p + s; it sees the depth-0 rows up to p and (p, 1..s); it predicts x[p + 2 + s]. The rule of attention is P-EAGLE's, so
the rows and the attention are the same code; only the passes are many.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle.drafter.model import Drafter
from peagle.training.attention import RowAttention
from peagle.training.chunks import Chunk

STEPS = 7  # depth 0 and six fed-back steps, as published
STEP_DECAY = 0.8  # weight of step s is 0.8^s: `ploss_weight` in the authors' traineagle3/main.py, and in SpecForge


def step_weights(steps: int = STEPS, decay: float = STEP_DECAY) -> Tensor:
    """Loss weight of each step [steps]; the trainer divides by their sum over the batch's rows (a weighted mean)."""
    return decay ** torch.arange(steps, dtype=torch.float64)


def forward_steps(drafter: Drafter, chunk: Chunk, aux: Tensor, attention: RowAttention) -> Tensor:
    """Normed rows [T, H] of a stepwise chunk: n depth-0 rows, then M rows of each later step."""
    n, width = chunk.num_anchors, chunk.chain_stride
    embeds = drafter.embed(chunk.token)
    hidden = drafter.combine(aux[chunk.start : chunk.end])
    normed, feedback = drafter(embeds[:n], hidden, chunk.position[:n], attention.over(0, n))
    outputs = [normed]
    feedback = feedback[chunk.step_source]
    for step in range(chunk.steps):
        lo = n + step * width
        rows = slice(lo, lo + width)
        normed, feedback = drafter(embeds[rows], feedback, chunk.position[rows], attention.over(lo, lo + width))
        outputs.append(normed)
    return torch.cat(outputs)
