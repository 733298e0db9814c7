"""What a run is, in words before it begins and as `run.json` beside its results."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import torch

import peagle
from peagle.drafter.config import DrafterConfig
from peagle.training.plan import Plan
from peagle.training.resume import Sources
from peagle.training.weights import Weights


def description(plan: Plan, weights: Weights) -> list[str]:
    """Lines to say before the first step."""
    config, schedule = plan.config, plan.schedule
    trainable = sum(p.numel() for p in weights.parameters)
    frozen = sum(p.numel() for p in weights.drafter.parameters()) - trainable
    steps = f"{plan.total_steps} steps" if plan.total_steps is not None else f"{config.max_minutes:g} minutes"
    lines = [
        f"{config.kind}: {trainable:,} parameters to train, {frozen:,} own and frozen; {config.layers} "
        f"layer(s), depths {config.depths}",
        f"{steps}; an epoch is {len(schedule.epoch(0))} steps, {int(schedule.lengths.sum()):,} tokens, "
        f"{len(schedule.lengths)} documents; {config.packs_per_step} packs of {config.pack_length} a step; chunks of "
        f"{plan.sizes.chunk_size}, {plan.sizes.loss_rows} rows a loss slice; {plan.backend} attention, {plan.dtype} on "
        f"{plan.device}" + (", activation checkpointing" if config.activation_checkpointing else ""),
    ]
    held = len(plan.held.lengths)
    if held < config.validation_documents:
        what = f"{held} documents" if held else "none: neither validation nor best/"
        lines.append(
            f"validation: {what}; {config.validation_documents} were asked for, and at most a tenth is held out"
        )
    if config.packs_per_step % plan.world.size:
        lines.append(
            f"packs_per_step: {config.packs_per_step} packs on {plan.world.size} processes leave some idle at "
            "the end of a step; a multiple does not"
        )
    return lines


def run_facts(plan: Plan, sources: Sources, head: DrafterConfig, target_name: str) -> dict[str, Any]:
    """The content of `run.json`."""
    import transformers

    cuda = plan.device.type == "cuda"
    return {
        "config": plan.config.to_dict(),
        "drafter": head.to_dict(),
        "sizes": asdict(plan.sizes),
        "total_steps": plan.total_steps,
        "data": sources.data,
        "states": sources.states,
        "target": {"name": target_name, "fingerprint": sources.target},
        "versions": {
            "peagle": peagle.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": torch.cuda.get_device_name(plan.device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
        "processes": plan.world.size,
    }
