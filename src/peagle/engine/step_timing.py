"""Timing a few steps at start-up, so that the number of drafts is chosen by measurements from the first request on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from peagle.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.engine.engine import Engine

BUDGET_SECONDS = 5.0
NUM_REQUESTS = (1, 4, 16)
PROMPT_TOKENS = 15  # no full block, and enough drafter rows to be timed
STEPS = 3  # of each kind; the first of its shape is slower and the fastest counts


def time_steps(engine: Engine, budget_seconds: float = BUDGET_SECONDS) -> None:
    """Run made-up requests, one, four and sixteen at once, without drafts and with all K.

    What would not be done in time is left out: it is learned while the engine runs. A large model on a slow machine
    is so timed with one request only, or not at all.
    """
    planner = engine.draft_planner
    if planner is None or planner.length is None:
        return
    most, end = engine.num_speculative_tokens, time.monotonic() + budget_seconds
    answer = (most + 1) * 2 * (1 + STEPS)
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, seed=0)
    if PROMPT_TOKENS + answer > engine.max_model_len:
        return
    for count in NUM_REQUESTS:
        if count > engine.config.max_num_seqs:
            break
        names = [f"start-up-{i}" for i in range(count)]
        for name in names:
            engine.add_request(name, [0] * PROMPT_TOKENS, params)
        for held in (0, most):
            planner.held = held
            if time.monotonic() + (1 + STEPS) * min(planner.timed.values(), default=0.0) > end:
                break
            for _ in range(1 + STEPS):  # the first one is no steady one
                engine.step()
        planner.held = None
        for name in names:
            engine.abort(name)
        measured = {k: planner.timed[count, k] for k in (0, most) if (count, k) in planner.timed}
        if len(measured) == 2:
            planner.length.costs.add(count, measured)
    engine.stats.reset()
