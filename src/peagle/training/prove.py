"""The attention's proof: one pack before the run compiles everything, and what fails is done without."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch

from peagle.errors import InputError
from peagle.training.fuse import unfuse
from peagle.training.plan import Plan, on_dense_attention
from peagle.training.step import pack_gradients
from peagle.training.target_states import TargetStates
from peagle.training.weights import Weights


def prove_attention(plan: Plan, weights: Weights, target_states: TargetStates, step: int) -> Plan:
    """Run the first pack of `step` and forget it; returns the plan to go on with: other attention where it failed."""
    if plan.backend == "dense":
        return plan
    epoch, at = plan.schedule.locate(step)
    alone = replace(plan.maker, rank=0, world=1)
    batch = alone.make(step, plan.schedule.epoch(epoch)[at][:1], stream=1).to(plan.device)
    n, target = plan.config.pack_length, target_states.target
    aux = torch.zeros(n, target_states.aux_size, dtype=plan.dtype, device=plan.device)
    hidden = torch.zeros(n, target.hidden_size, dtype=target.dtype, device=plan.device)
    try:
        pack_gradients(plan, weights, target, batch.packs[0], aux, hidden)
        return plan
    except (torch.OutOfMemoryError, InputError):
        raise
    except Exception as error:  # whatever the compiler stack raises
        if plan.backend == "flash":
            if plan.config.attention == "flash":
                raise
            warnings.warn(f"FlashAttention 4 failed, FlexAttention takes its place (slower): {error}", stacklevel=2)
            return prove_attention(replace(plan, backend="flex"), weights, target_states, step)
        if weights.fused:
            warnings.warn(f"a compiled layer failed, trying uncompiled ones (slower): {error}", stacklevel=2)
            weights.fused = False
            unfuse(weights.copy.compute)
            return prove_attention(plan, weights, target_states, step)
        if plan.config.attention == "flex":
            raise
        warnings.warn(f"FlexAttention failed, dense attention takes its place (slower): {error}", stacklevel=2)
        return on_dense_attention(plan, weights.drafter.config)
    finally:
        if weights.sharded is not None:
            weights.sharded.forget()
        for module in (weights.drafter, weights.copy.compute):
            module.zero_grad(set_to_none=True)
