"""AdamW for everything, or Muon for the matrices."""

from __future__ import annotations

import torch

from peagle.config.training import TrainConfig
from peagle.training.optimizer import Optimizer

from .helpers import tiny_drafter


def config(optimizer: str, **over: object) -> TrainConfig:
    return TrainConfig(target="t", data="d", output="o", optimizer=optimizer, **over)  # type: ignore[arg-type]


def test_every_trainable_parameter_is_in_one_group() -> None:
    drafter = tiny_drafter("p-eagle", dtype=torch.float32, own_embed_tokens=True)
    assert drafter.embed_tokens is not None
    names = {id(p): name for name, p in drafter.named_parameters()}
    for kind in ("adamw", "muon"):
        groups = [group for part in Optimizer(drafter, config(kind), False).parts for group in part.param_groups]
        found = [names[id(p)] for group in groups for p in group["params"]]
        assert sorted(found) == sorted(names.values())
        for group in groups:
            assert all((p.dim() == 2) == (group["weight_decay"] > 0) for p in group["params"])
    # the vocabulary's rows are not a map between hidden states
    muon = Optimizer(drafter, config("muon"), False).parts[1]
    assert "embed_tokens.weight" not in [names[id(p)] for p in muon.param_groups[0]["params"]]


def test_muon_moves_a_matrix_by_an_orthogonal_step_of_adamws_size() -> None:
    drafter = tiny_drafter("eagle3", dtype=torch.float32)
    optimizer = Optimizer(drafter, config("muon", weight_decay=0.0), False)
    before = drafter.fc.weight.detach().clone()
    for p in drafter.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step(1e-2)
    step = (drafter.fc.weight - before).detach()
    values = torch.linalg.svdvals(step)
    assert values.max() / values.min() < 3  # Newton-Schulz brings singular values near each other, not to equality
    assert 0.1 * 1e-2 < step.square().mean().sqrt() < 0.4 * 1e-2  # 0.2 of the learning rate
    optimizer.zero_grad()
    assert all(p.grad is None for p in drafter.parameters())
