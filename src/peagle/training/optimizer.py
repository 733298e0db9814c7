"""The optimizer of a run: AdamW for everything, or Muon for the matrices and AdamW for the rest."""

from __future__ import annotations

from typing import Any

import torch

from peagle.config.training import TrainConfig
from peagle.drafter.model import Drafter

VOCABULARY = ("embed_tokens.", "lm_head.")  # rows are tokens: Muon is for maps between hidden states


class Optimizer:
    """PyTorch's optimizers under one learning rate, as one object to step, save and load.

    Muon (Jordan et al., 2024) moves a matrix by its orthogonalised momentum; scaled to the size of AdamW's updates
    (arXiv 2502.16982, "match_rms_adamw"), so both share `lr`. Norms and `mask_hidden` have no weight decay.
    """

    def __init__(self, drafter: Drafter, config: TrainConfig, fused: bool) -> None:
        named = [(name, p) for name, p in drafter.named_parameters() if p.requires_grad]
        matrices = [p for name, p in named if p.dim() == 2 and not name.startswith(VOCABULARY)]
        vocabulary = [p for name, p in named if p.dim() == 2 and name.startswith(VOCABULARY)]
        rest = [p for _, p in named if p.dim() != 2]
        muon = config.optimizer == "muon"
        decayed = vocabulary if muon else matrices + vocabulary
        groups: list[dict[str, Any]] = [
            {"params": decayed, "weight_decay": config.weight_decay},
            {"params": rest, "weight_decay": 0.0},
        ]
        self.parts: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(
                [group for group in groups if group["params"]],
                lr=config.lr,
                betas=(config.beta1, config.beta2),
                fused=fused,
            )
        ]
        if muon:
            self.parts.append(
                torch.optim.Muon(
                    matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
                )
            )

    def step(self, lr: float) -> None:
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr
            part.step()

    def zero_grad(self) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=True)

    def state_dict(self) -> list[dict[str, Any]]:
        return [part.state_dict() for part in self.parts]

    def load_state_dict(self, states: list[dict[str, Any]]) -> None:
        for part, state in zip(self.parts, states, strict=True):
            part.load_state_dict(state)
