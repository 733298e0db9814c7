"""The dry run: what a run would take, from a few steps whose results nobody keeps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

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
    trained = sum(p.numel() for p in weights.parameters) * parameter_bytes(
        plan.dtype, plan.world.size if weights.sharded is not None else 1
    )
    whose = "" if weights.sharded is None else f", a shard of {plan.world.size} in this process"
    model = target_states.target.model
    held = sum(p.numel() * p.element_size() for p in model.parameters() if p.device == plan.device)
    say(
        f"memory: peak {peak_memory(plan.device) / gib:.2f} GiB on {plan.device}: {held / gib:.2f} GiB the target, "
        f"{trained / gib:.2f} GiB weights, gradients and Adam's moments in float32{whose}"
    )
    say(
        f"time: {seconds:.2f} s a step, {tokens / steps / seconds:,.0f} tokens/s (measured over {steps} steps, "
        f"without validation): {left:,.0f} steps{after}, {left * seconds / 60:.1f} minutes"
    )


def parameter_bytes(dtype: torch.dtype, shards: int) -> float:
    """Bytes of a process for a parameter of the head: weight, gradient and Adam's two moments in float32; where
    processes share it, a part of these, and in a step the weight in `dtype` and the gradient whole."""
    return 16.0 if shards == 1 else 4 + dtype.itemsize + 12 / shards
