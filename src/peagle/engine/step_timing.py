"""Timing a few steps at start-up, so that the number of drafts is chosen by measurements from the first request on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from peagle.engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from peagle.engine.engine import Engine

BUDGET_SECONDS = 3.0
NUM_REQUESTS = (1, 4)
PROMPT_TOKENS = 8
STEPS = 3  # of each kind; the first of its shape is slower and the fastest counts


def time_steps(engine: Engine, budget_seconds: float = BUDGET_SECONDS) -> None:
    """Run made-up requests, first one and then four at once, without drafts, with all K and with one.

    What would not be done in time is left out: it is learned while the engine runs. A large model on a slow machine
    is so timed with few requests only.
    """
    planner = engine.draft_planner
    if planner is None or planner.length is None:
        return
    length, most = planner.length, engine.num_speculative_tokens
    end = time.monotonic() + budget_seconds
    answer = (most + 1) * 4 * STEPS
    room = engine.max_model_len - PROMPT_TOKENS - answer
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, seed=0)
    for count in NUM_REQUESTS:
        if count > engine.config.max_num_seqs or room < 0:
            break
        names = [f"start-up-{i}" for i in range(count)]
        for name in names:
            engine.add_request(name, [0] * PROMPT_TOKENS, params)
        for held in (0, most, 1) if most > 1 else (0, 1):
            planner.held = held
            steps = 1 + STEPS  # the first one is no steady one
            # how long a step took with fewer requests says at least how long this one will
            known = length.costs[held].seconds or length.costs[0].seconds
            if known and time.monotonic() + steps * known[-1] > end:
                break
            for _ in range(steps):
                engine.step()
        planner.held = None
        for name in names:
            engine.abort(name)
    engine.stats.reset()
