"""Data parallel training under torchrun: every process has the whole head and a share of each step's packs.

By hand instead of DDP: a pack's backward runs once a chunk, and gradients must meet once a step whatever the chunks.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from peagle.errors import InputError

PATIENT = datetime.timedelta(days=7)


@dataclass(frozen=True)
class World:
    """This process among `size`; rank 0 alone writes and speaks."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        return self.rank == 0

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def agree(self, values: Sequence[float]) -> list[float]:
        """The largest of each value over the processes. On the host: the device's queue goes on meanwhile."""
        if self.size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def total(self, value: float) -> float:
        """Sum over the processes, on the host."""
        if self.size == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(tensor)
        return float(tensor)

    @contextmanager
    def patient(self) -> Iterator[Callable[[Tensor], None]]:
        """For work that takes some processes hours longer than others: gives what sums a tensor on the host over the
        processes, in place, once all have come to it."""
        if self.size == 1:
            yield lambda _tensor: None
            return
        # a group of its own: the time limit of the other one is for processes that hang in the middle of a run
        group = dist.new_group(backend="gloo", timeout=PATIENT)
        try:
            yield lambda tensor: dist.all_reduce(tensor, group=group)
        finally:
            dist.destroy_process_group(group)

    def same_weights(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give every process the first one's weights."""
        if self.size > 1:
            for parameter in parameters:
                dist.broadcast(parameter.data, 0)

    def mean_gradients(self, parameters: Sequence[nn.Parameter], loss: Tensor, weight: float) -> Tensor:
        """Turn gradients and loss (scalar), means over this process's rows, into those over all rows.

        weight: sum of this process's row weights, 0 without supervised rows. One collective. Returns the loss.
        """
        for parameter in parameters:
            if parameter.grad is None:  # no row used it: the same as a gradient of 0 in every process count
                parameter.grad = torch.zeros_like(parameter)
        if self.size == 1:
            return loss
        gradients = [p.grad for p in parameters if p.grad is not None]
        own = torch.tensor([weight], dtype=torch.float32).to(loss.device, non_blocking=True)
        flat = torch.cat([*(g.flatten().float() for g in gradients), loss.flatten().float(), torch.ones_like(own)])
        flat *= own
        dist.all_reduce(flat)
        flat /= flat[-1].clamp(min=1e-9)
        at = 0
        for gradient in gradients:
            gradient.copy_(flat[at : at + gradient.numel()].view_as(gradient))
            at += gradient.numel()
        return flat[at].to(loss.dtype)


ALONE = World()


def join(device: str) -> tuple[World, str]:
    """The world that torchrun describes in the environment, and this process's device; alone without torchrun."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return World(), device
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    cuda = device.startswith("cuda")
    if cuda:
        if local >= torch.cuda.device_count():
            raise InputError(
                f"device: process {local} of this machine has no GPU ({torch.cuda.device_count()} found); lower "
                "torchrun's --nproc-per-node"
            )
        device = f"cuda:{local}"
        torch.cuda.set_device(local)
    if not dist.is_initialized():
        # gloo beside NCCL: what the processes must agree on each step must not wait for the device
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=datetime.timedelta(minutes=30))
    return World(rank, size), device


def leave() -> None:
    """End what `join` began, its threads included."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
        gc.collect()  # FSDP's modules are cycles that hold the group, and its threads end with its last holder
