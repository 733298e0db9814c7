"""Fused RoPE and SwiGLU compute what the layers do; the compiler is stood in for by its input."""

from __future__ import annotations

import pytest
import torch

from peagle.training import fuse
from peagle.training.losses import LossSettings
from peagle.training.partition import train_pack

from .helpers import chunk_loss, chunks_of, table_of, tiny_drafter, tiny_pack
from .test_partition import gradients, states


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_fused_layers_give_the_same_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []

    def note(function):  # type: ignore[no-untyped-def]
        used.append(function.__name__)
        return function

    monkeypatch.setattr(fuse, "_compiled", note)
    drafter, pack = tiny_drafter(kind, 2), tiny_pack()
    table = table_of(pack, kind)
    aux, hidden = states(table.num_anchors)
    loss = chunk_loss(drafter, hidden, LossSettings("soft", 4))
    found = []
    for action in (lambda _: None, fuse.fuse_elementwise, fuse.unfuse):
        action(drafter)
        before = len(used)
        result = train_pack(drafter, chunks_of(pack, table, kind, 20), aux, loss, "dense")
        found.append((result.loss, gradients(drafter)))
        assert (len(used) > before) == (action is fuse.fuse_elementwise)
    for other_loss, other in found[1:]:
        assert torch.equal(other_loss, found[0][0])
        assert all(torch.equal(other[name], found[0][1][name]) for name in other)
