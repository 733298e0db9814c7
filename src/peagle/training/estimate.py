"""The dry run: what a run would take, from a few steps whose results nobody keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from peagle.training.memory import peak_memory
from peagle.training.plan import Plan
from peagle.training.prove import prove_attention
from peagle.training.step import train_step
from peagle.training.target_states import TargetStates
from peagle.training.train_state import TrainState
from peagle.training.weights import Weights


def estimate(
    plan: Plan,
    weights: Weights,
    target_states: TargetStates,
    state: TrainState,
    say: Callable[[str], None],
    steps: int = 2,
) -> None:
    """Say peak memory and time a step, measured over `steps` steps after one that warms up. The weights change."""
    plan = prove_attention(plan, weights, target_states, state.step)
    packs = plan.schedule.epoch(0)[0]
    tokens = 0
    for i in range(steps + 1):
        batch = plan.maker.make(i, packs, stream=1)
        if i == 1:
            float(state.sums.loss)  # waits for the device
            began, tokens = time.perf_counter(), 0
        train_step(plan, weights, target_states, state, batch, plan.config.lr)
        tokens += batch.tokens
    float(state.sums.loss)
    seconds = (time.perf_counter() - began) / steps
    left = math.inf if plan.total_steps is None else max(plan.total_steps - state.step, 0)
    if plan.config.max_minutes is not None:
        left = min(left, max(60 * plan.config.max_minutes - state.elapsed(), 0.0) / seconds)
    after = f" after the {state.step:,} that are done" if state.step else ""
    gib = 2**30
    trained = sum(p.numel() for p in weights.parameters)
    model = target_states.target.model
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.device == plan.device)
    say(
        f"memory: peak {peak_memory(plan.device) / gib:.2f} GiB on {plan.device}: {held / gib:.2f} GiB the target, "
        f"{16 * trained / gib:.2f} GiB weights, gradients and Adam's moments in float32"
    )
    say(
        f"time: {seconds:.2f} s a step, {tokens / steps / seconds:,.0f} tokens/s (measured over {steps} steps, "
        f"without validation): {left:,.0f} steps{after}, {left * seconds / 60:.1f} minutes"
    )
