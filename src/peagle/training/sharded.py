"""A large head on many GPUs: FSDP2 keeps weights in float32, gradients and the optimizer's state in shards.

A pack's backward runs once a chunk and gradients must meet once a step, so the whole head is gathered for the length of
a step (a head is small beside its target), chunks add their gradients up locally, and one reduce-scatter ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only

from peagle.drafter.model import Drafter
from peagle.training.batches import StepBatch
from peagle.training.chunks import scale_weights
from peagle.training.distributed import World
from peagle.training.optimizer import Optimizer


class ShardedDrafter:
    """Stands in `ComputeCopy`'s place: `compute` is the drafter itself, gathered in `dtype` while it runs."""

    def __init__(self, drafter: Drafter, dtype: torch.dtype) -> None:
        own = drafter.fc.weight.dtype
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        if dtype != own:
            policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=own, cast_forward_inputs=False)
        self.dtype = dtype
        fully_shard(drafter, mp_policy=policy, reshard_after_forward=False)
        weight = drafter.fc.weight
        assert isinstance(weight, DTensor)
        self.mesh = weight.device_mesh
        self.compute = drafter
        self._module.set_reshard_after_backward(False)
        self._module.set_requires_gradient_sync(False)

    @property
    def _module(self) -> FSDPModule:
        assert isinstance(self.compute, FSDPModule)
        return self.compute

    def refresh(self) -> None:
        """Gather the weights, after a step or a load."""
        self._module.reshard()
        self._module.unshard()

    def bind(self, target_embed: Tensor, target_lm_head: Tensor) -> None:
        """Share the target's weights with the drafter, in the dtype that it runs in."""
        self.compute.bind(target_embed.to(self.dtype), target_lm_head.to(self.dtype))

    def share(self, batch: StepBatch, world: World) -> StepBatch:
        """A copy whose row weights are shares of all processes' sum, times their number (FSDP divides by it)."""
        own = batch.weight if batch.rows else 0.0
        factor = own * world.size / max(world.total(own), 1e-9)
        return replace(batch, packs=[[scale_weights(chunk, factor) for chunk in pack] for pack in batch.packs])

    def collect(self) -> None:
        """Sum the gradients of all chunks over the processes, each keeping its shard; every process calls it."""
        module = self._module
        # weights used before the drafter's own forward (`fc`, `mask_hidden`) get their gradient after FSDP has taken
        # the others' into the dtype that it sums in; one pass more takes these too, for all must have one dtype
        self._pass_of_zeros()
        module.set_requires_gradient_sync(True)
        self._pass_of_zeros()
        module.set_requires_gradient_sync(False)
        module.reshard()

    def _pass_of_zeros(self) -> None:
        """A pass whose gradient is 0, which brings FSDP to its end; each weight takes part, used by a row or not."""
        device, hidden_size = self.compute.fc.weight.device, self.compute.config.hidden_size
        row = torch.zeros(1, hidden_size, dtype=self.dtype, device=device)
        position = torch.zeros(1, dtype=torch.int64, device=device)
        normed, _ = self.compute(row, row, position, lambda _layer, q, _k, _v: q)
        nothing = normed.sum() * 0.0
        for parameter in self.compute.parameters():
            if parameter.requires_grad:
                nothing = nothing + parameter.flatten()[:1].sum() * 0.0
        nothing.backward()

    def forget(self) -> None:
        """Drop the gradients of a trial, or of a step that is given up."""
        self.collect()
        self.compute.zero_grad(set_to_none=True)
        self.refresh()

    def whole(self) -> Drafter:
        """An unsharded copy on the host, not bound; every process calls this."""
        copy = Drafter(self.compute.config)
        copy.load_state_dict(whole(self.compute.state_dict()))  # FSDP shards the weights for it
        self.refresh()
        return copy

    def release(self) -> None:
        """Let go of the processes' group, after the last use of the weights.

        DTensor's caches keep the mesh for good, and the mesh keeps the group (PyTorch 2.13; for torch.compile alone).
        A thread of gloo's that outlives `leave` and drops a tensor while the interpreter ends aborts the process.
        """
        getattr(self.mesh, "_pg_registry", {}).clear()


def full(tensor: Tensor) -> Tensor:
    """A tensor that the processes may hold parts of, put together on its device; every process calls it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def whole(state: Any, keep: bool = True) -> Any:
    """A nested state with its sharded tensors put together on the host, one after another; every process calls this.

    keep: False where the result is not wanted and must not take memory.
    """

    def gather(tensor: DTensor) -> Tensor | None:
        full = tensor.full_tensor()
        return full.cpu() if keep else None

    return tree_map_only(DTensor, gather, state)


@torch.no_grad()
def load_weights(drafter: Drafter, state: dict[str, Tensor]) -> None:
    """`load_state_dict` with whole tensors, whether the drafter's are sharded or not."""
    for name, tensor in drafter.state_dict().items():
        value = state[name].to(tensor.device, tensor.dtype)
        tensor.copy_(_like(tensor, value))


def load_optimizer(optimizer: Optimizer, states: list[dict[str, Any]]) -> None:
    """`load_state_dict` with whole tensors, whether the optimizer's are sharded or not."""
    moved = []
    for part, state in zip(optimizer.parts, states, strict=True):
        parameters = [p for group in part.param_groups for p in group["params"]]
        of = {
            index: {name: _like_if_same(parameters[index], value) for name, value in values.items()}
            for index, values in state["state"].items()
        }
        moved.append(state | {"state": of})
    optimizer.load_state_dict(moved)


def _like_if_same(parameter: Tensor, value: Any) -> Any:
    if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
        return _like(parameter, value)
    return value


def _like(sharded: Tensor, value: Tensor) -> Tensor:
    """A whole tensor laid out as another one is."""
    if not isinstance(sharded, DTensor):
        return value
    return distribute_tensor(value.to(sharded.device), sharded.device_mesh, sharded.placements)


@torch.no_grad()
def load_tensors(parts: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy whole tensors into others, sharded or not."""
    for part, value in zip(parts, values, strict=True):
        part.copy_(_like(part, value.to(part.device)))
