"""Drafter rows that are made later than the target's: what they need is kept, and they are made many at a time.

Where no drafts are wanted the drafter would run for nothing but its own cache. Instead the target's auxiliary states,
which otherwise exist only in the step that computes a position, are kept under the block tables, a row a slot. When
drafts are wanted again all rows that are missing run in one pass, which is cheaper than one pass a step, and the cache
is what it would have been.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from torch import Tensor

from peagle.engine.drafting import DraftPass
from peagle.engine.lanes import Lanes
from peagle.engine.plan import StepPlan
from peagle.engine.step_inputs import ragged, to_device
from peagle.target.paged_attention import PagedBatch


class LateRows:
    """Auxiliary states of every position of the KV cache, and the pass that makes drafter rows of them."""

    def __init__(self, draft_pass: DraftPass, lanes: Lanes, num_blocks: int, dtype: torch.dtype) -> None:
        self.draft_pass, self.lanes = draft_pass, lanes
        shape = (num_blocks * lanes.block_size, draft_pass.drafter.config.aux_size)
        self.states = torch.zeros(shape, dtype=dtype, device=lanes.tokens.device)

    def keep(self, slots: Tensor, aux: Tensor) -> None:
        """Keep states [T, 3H] of rows by their slots [T]; a rejected draft's stand until its position runs again."""
        self.states.index_copy_(0, slots, aux)

    def make_up(self, plan: StepPlan) -> float:
        """Run the rows that a plan makes up, all of whose tokens are known; returns the seconds that took."""
        assert plan.drafting is not None
        began = time.perf_counter()
        all_counts = np.array(plan.drafting.make_up, dtype=np.int64)
        index = np.flatnonzero(all_counts)
        if len(index) == 0:
            return 0.0
        lanes, size = self.lanes, self.lanes.block_size
        counts, lane = all_counts[index], np.array(plan.lanes, dtype=np.int64)[index]
        first = np.array(plan.drafting.first, dtype=np.int64)[index]
        ends = first + counts
        query_start, owner, within = ragged(counts)
        positions = first[owner] + within
        tables = lanes.block_tables[lane, : -(-int(ends.max()) // size)]
        slots = tables[owner, positions // size].astype(np.int64) * size + positions % size
        following = lane[owner] * lanes.width + positions + 1  # a row reads the token behind its position
        device = self.states.device
        moved_positions, moved_slots, token_index = to_device([positions, slots, following], device)
        start32, ends32, moved_tables = to_device([query_start.astype(np.int32), ends.astype(np.int32), tables], device)
        batch = PagedBatch(
            moved_positions, start32, ends32, moved_tables, moved_slots, int(counts.max()), int(ends.max())
        )
        self.draft_pass.enter(lanes.flat_tokens[token_index].long(), self.states[moved_slots], batch)
        return time.perf_counter() - began
