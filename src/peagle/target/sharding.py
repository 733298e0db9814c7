"""A target spread over several devices by Transformers' plan (`device_map`), for one process that reads its states.

Accelerate's hooks move what a module reads to where the module lies; weights that it has offloaded to the host are meta
tensors in the model, and are read from its own store.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from peagle.config.device_map import DeviceMap
from peagle.errors import InputError


@dataclass(frozen=True)
class HomeWeights:
    """What a head shares with its target, on the head's device. embed [V, H], lm_head [V, H]."""

    embed: Tensor
    lm_head: Tensor
    logits: Callable[[Tensor], Tensor]  # the LM head: rows [..., H] -> [..., V]


def check_device_map(device_map: DeviceMap) -> None:
    """Refuse a map where Transformers cannot follow it: without accelerate, or with a GPU that is not there."""
    if find_spec("accelerate") is None:
        raise InputError("target_device_map: needs the package accelerate (pip install accelerate)")
    if isinstance(device_map, str):
        return
    gpus = torch.cuda.device_count()
    for module, place in device_map.items():
        number = place if isinstance(place, int) else int(place[5:]) if place != "cpu" else -1
        if number >= gpus:
            raise InputError(f"target_device_map: {module!r} is to lie on {place!r}, and PyTorch sees {gpus} GPUs here")


def check_places(model: PreTrainedModel, device_map: DeviceMap) -> None:
    """Refuse a map that leaves a weight out, or names a module that the model has not: Transformers says so only where
    several devices are named, and the rest would lie on the host."""
    if isinstance(device_map, str):
        return
    covered = set(device_map)
    known = {name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())}
    if unknown := covered - known:
        raise InputError(f"target_device_map: {type(model).__name__} has no {min(unknown)}, expected modules of it")
    for name, _ in model.named_parameters():
        parts = name.split(".")
        if covered.isdisjoint(".".join(parts[:i]) for i in range(len(parts) + 1)):
            raise InputError(f'target_device_map: says nothing of {name}, expected a device for every module ("": all)')


def check_alone_on_host() -> None:
    """Refuse a spread target in one of several processes of a machine: each would take all of its GPUs."""
    # other launchers than torchrun may not say how many of the processes are here
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
    if processes > 1:
        raise InputError(
            f"target_device_map: {processes} processes share this machine's GPUs, expected one process a machine "
            "(torchrun --nproc-per-node 1), or a target that fits one GPU"
        )


def read_parameter(model: PreTrainedModel, parameter: Tensor) -> Tensor:
    """A parameter of the model wherever it lies; one that was offloaded comes from where it is kept, to the host."""
    if not parameter.is_meta:
        return parameter
    from transformers.integrations.accelerate import load_offloaded_parameter

    name = next(name for name, own in model.named_parameters(remove_duplicate=False) if own is parameter)
    return load_offloaded_parameter(model, name)


@torch.no_grad()
def home_weights(model: PreTrainedModel, home: torch.device) -> HomeWeights:
    """Embeddings and LM head on `home`, copied where they lie elsewhere. Raises InputError: no room, or a LM head that
    is more than a matrix."""
    embed, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    try:
        at_home = read_parameter(model, embed).to(home)
        if head.weight.device == home:
            return HomeWeights(at_home, head.weight, head)
        weight = at_home if head.weight is embed else read_parameter(model, head.weight).to(home)
        bias = getattr(head, "bias", None)
        bias = None if bias is None else read_parameter(model, bias).to(home)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"target_device_map: no room on {home} for the target's embeddings and LM head, which the head shares "
            f"(balanced_low_0 leaves the most on the first GPU; {str(error).splitlines()[0]})"
        ) from None
    if not isinstance(head, nn.Linear):
        raise InputError(
            f"target_device_map: the LM head is a {type(head).__name__} and lies elsewhere than {home}, expected a "
            "JSON object that puts it there"
        )
    return HomeWeights(at_home, weight, lambda hidden: F.linear(hidden, weight, bias))
