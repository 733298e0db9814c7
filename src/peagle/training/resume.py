"""What a checkpoint of a run holds, which runs may go on from it, and how."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from peagle.config.training import TrainConfig
from peagle.errors import InputError
from peagle.training.average import local
from peagle.training.checkpoints import checkpoint_folders, load_latest, save_checkpoint
from peagle.training.distributed import World
from peagle.training.identity import same_target
from peagle.training.plan import Plan
from peagle.training.sharded import load_optimizer, load_tensors, load_weights, whole
from peagle.training.train_state import TrainState
from peagle.training.validate import Validation
from peagle.training.weights import Weights

STATE_FORMAT = 2


@dataclass(frozen=True)
class Sources:
    """What a run learns from: fingerprints of data and target, where the target's states come from, and in what head
    and target compute."""

    data: str
    target: str
    states: str
    computed: str


def checkpoints_of(config: TrainConfig) -> Path:
    return Path(config.output) / "checkpoints"


def load_run(config: TrainConfig, sources: Sources) -> dict[str, Any] | None:
    """The checkpoint to go on from; None for a new run. Raises InputError when the run in `output` cannot go on so."""
    folder = checkpoints_of(config)
    if not checkpoint_folders(folder):
        return None
    if config.resume == "never":
        raise InputError(f"output: {folder.parent} holds a run already, expected an empty folder or resume auto")
    saved = load_latest(folder)
    if saved is None:
        raise InputError(f"output: none of the checkpoints in {folder} can be read; delete them to start again")
    if saved.get("format") != STATE_FORMAT:
        raise InputError(f"output: checkpoints in {folder} are of format {saved.get('format')}, not {STATE_FORMAT}")
    changed = config.differences(saved["config"])
    # where target, data and states lie may change, what they are may not
    changed = [line for line in changed if not line.startswith(("target:", "data:", "hidden_states:"))]
    if "computed" in saved:  # earlier versions did not say; auto is another dtype on another device
        changed = [line for line in changed if not line.startswith("dtype:")]
        if saved["computed"] != sources.computed:
            changed.append(f"dtype: {saved['computed']} -> {sources.computed}")
    if saved.get("states", "online") != sources.states:
        changed.append(f"hidden_states: {saved.get('states', 'online')} -> {sources.states}")
    if saved["data"] != sources.data:
        changed.append(f"data: fingerprint {saved['data'][:16]} -> {sources.data[:16]}")
    if not same_target(saved["target"], sources.target):
        changed.append(f"target: fingerprint {saved['target']} -> {sources.target}")
    if changed:
        raise InputError(
            f"output: {folder.parent} holds a run with other settings, which cannot be resumed with these "
            f"({'; '.join(changed)}); use another output folder or the old settings"
        )
    return saved


def restore(saved: dict[str, Any], weights: Weights, state: TrainState, world: World) -> None:
    """Put weights, optimizer, generator and state where the checkpoint left them; `weights.copy` is to be refreshed."""
    load_weights(weights.drafter, saved["drafter"])
    load_optimizer(weights.optimizer, saved["optimizer"])
    if weights.average is not None:
        load_tensors(weights.average.averages, saved["average"])
    torch.set_rng_state(saved["rng"])
    state.step, state.elapsed_before = saved["step"], saved["elapsed"]
    state.documents, state.tokens = saved["documents"], saved["tokens"]
    state.best = saved.get("best", 0.0)
    state.validated_at = saved.get("validated_at", state.step - 1)
    if saved.get("validation") is not None:
        state.validation = Validation(**saved["validation"])
    log, sums = saved["log"], state.sums
    if world.first:  # they are all processes' already, and are summed over the processes again
        sums.stats = log["stats"].to(sums.stats.device)
    sums.loss = log["loss"].to(sums.loss.device)
    sums.steps, sums.tokens = log["steps"], log["tokens"]


def save_run(plan: Plan, sources: Sources, weights: Weights, state: TrainState) -> None:
    """Write a checkpoint of the current step (every process calls this, the first one writes). Raises InputError for
    weights that are not finite, and when it cannot be written."""
    world = plan.world
    state.sums.collect(world)
    finite = all(bool(p.isfinite().all()) for p in local(weights.parameters))
    if world.agree([float(not finite)])[0]:
        raise InputError(f"lr: training diverged before step {state.step} (weights are not finite); lower it")
    content: dict[str, Any] = {}
    if weights.sharded is not None:
        content = whole(_content(plan, sources, weights, state), keep=world.first)
        weights.copy.refresh()
    elif world.first:
        content = _content(plan, sources, weights, state)
    if world.first:
        save_checkpoint(checkpoints_of(plan.config), state.step, content, plan.config.keep_checkpoints)


def _content(plan: Plan, sources: Sources, weights: Weights, state: TrainState) -> dict[str, Any]:
    sums = state.sums
    return {
        "format": STATE_FORMAT,
        "step": state.step,
        "elapsed": state.elapsed(),
        "config": plan.config.to_dict(),
        "data": sources.data,
        "target": sources.target,
        "states": sources.states,
        "computed": sources.computed,
        "sizes": asdict(plan.sizes),
        "drafter": weights.drafter.state_dict(),
        "optimizer": weights.optimizer.state_dict(),
        "average": None if weights.average is None else weights.average.averages,
        "rng": torch.get_rng_state(),
        "log": {"stats": sums.stats, "loss": sums.loss, "steps": sums.steps, "tokens": sums.tokens},
        "documents": state.documents,
        "tokens": state.tokens,
        "best": state.best,
        "validated_at": state.validated_at,
        "validation": None if state.validation is None else asdict(state.validation),
    }
