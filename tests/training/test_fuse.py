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
        for name, gradient in other.items():
            torch.testing.assert_close(gradient, found[0][1][name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_backward_formulas_are_autograds(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuse, "_compiled", lambda function: function)
    torch.manual_seed(0)
    rows, inner, hidden = 7, 12, 5

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype)

    angle = draw(rows, 1, 4).repeat(1, 1, 2)  # both halves turn alike
    cases = [
        (
            (draw(rows, 3, 8), draw(rows, 2, 8)),
            lambda q, k: fuse.Rope.apply(q, k, angle.cos(), angle.sin()),
            lambda q, k: fuse.rope_both(q, k, angle.cos(), angle.sin()),
        ),
        (
            (draw(rows, inner), draw(rows, inner), draw(hidden, inner)),
            lambda *x: (fuse.SwigluDown.apply(*x),),
            lambda gate, up, weight: (torch.nn.functional.linear(fuse.swiglu(gate, up), weight),),
        ),
    ]
    tolerance = 1e-12 if dtype == torch.float64 else 3e-2
    for values, fused, plain in cases:
        seeds, results = None, []
        for way in (plain, fused):
            leaves = [x.clone().requires_grad_() for x in values]
            outs = way(*leaves)
            seeds = [torch.randn_like(out) for out in outs] if seeds is None else seeds
            results.append([*outs, *torch.autograd.grad(outs, leaves, seeds)])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
