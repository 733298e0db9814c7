"""bf16 compute with fp32 master weights: the drafter that runs is a bf16 copy of the one that is optimised."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peagle.drafter.model import Drafter, make_rotary


class ComputeCopy:
    """`compute` is the drafter to run; its gradients arrive in the fp32 `master`'s `.grad` after every backward.

    In the master's own dtype there is no copy: both are the same module. A cast copy, instead of autocast, keeps norms
    and residuals in bf16 kernels too, and casts each weight once a step rather than once a chunk.
    """

    def __init__(self, master: Drafter, dtype: torch.dtype) -> None:
        self.master = master
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        if dtype == master.fc.weight.dtype:
            self.compute = master
            return
        device = master.fc.weight.device
        self.compute = Drafter(master.config).to(device=device, dtype=dtype)
        self.compute.rotary = make_rotary(master.config).to(device)  # its frequencies must stay fp32
        if master.d2t is not None:
            self.compute.d2t = master.d2t
        copies = dict(self.compute.named_parameters())
        for name, parameter in master.named_parameters():
            copy = copies[name]
            copy.requires_grad_(parameter.requires_grad)
            self.pairs.append((copy, parameter))
            if parameter.requires_grad:
                copy.register_post_accumulate_grad_hook(_move_gradient(parameter))
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the master's weights into the compute copy, after a step or a load."""
        if self.pairs:
            torch._foreach_copy_([copy for copy, _ in self.pairs], [master.detach() for _, master in self.pairs])

    def bind(self, target_embed: Tensor, target_lm_head: Tensor) -> None:
        """Share the target's weights with the drafter that runs, in its dtype (no copy where the target has it)."""
        dtype = self.compute.fc.weight.dtype
        self.compute.bind(target_embed.to(dtype), target_lm_head.to(dtype))


def _move_gradient(master: nn.Parameter):  # type: ignore[no-untyped-def]
    def hook(copy: Tensor) -> None:
        assert copy.grad is not None
        if master.grad is None:
            master.grad = copy.grad.to(master.dtype)
        else:
            master.grad += copy.grad
        copy.grad = None

    return hook
