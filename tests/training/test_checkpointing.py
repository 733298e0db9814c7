"""Activation checkpointing: layers run again in the backward, with the same gradients and less to keep."""

from __future__ import annotations

import functools
import gc
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.drafter import Drafter, load_drafter
from peagle.training import attention, fuse
from peagle.training.attention import RowAttention
from peagle.training.losses import LossSettings
from peagle.training.memory import choose_chunk_size
from peagle.training.partition import forward_chunk, train_pack
from peagle.training.trainer import train_on

from .helpers import chunk_loss, chunks_of, flex_by_hand, listed_answers, table_of, tiny_drafter, tiny_pack, tiny_target
from .test_distributed import assert_same, run_on
from .test_partition import DEPTHS, gradients, relative, states
from .test_trainer import config, metrics, quiet


def count_runs(drafter: Drafter) -> list[int]:
    """The layers' numbers as they run."""
    ran: list[int] = []
    for layer in drafter.layers:
        layer.register_forward_pre_hook(lambda module, _: ran.append(module.layer))
    return ran


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("backend", ["dense", "flex"])
def test_gradients_are_the_same(kind: str, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # FlexAttention has no backward on a CPU: a stand-in reads the same block mask, tile by tile
    monkeypatch.setattr(attention, "_flex_attention", lambda _device: flex_by_hand)
    drafter = tiny_drafter(kind, 3, own_lm_head=True, own_embed_tokens=True)
    pack = tiny_pack()
    table = table_of(pack, kind, DEPTHS)
    aux, hidden = states(table.num_anchors)
    loss = chunk_loss(drafter, hidden, LossSettings("soft", DEPTHS))
    ran = count_runs(drafter)
    passes = 1 if kind == "p-eagle" else DEPTHS
    for size in (7, 64, table.num_anchors):  # several packed documents in parts and whole
        chunks = chunks_of(pack, table, kind, size, DEPTHS)
        drafter.checkpoint_layers = False
        plain = train_pack(drafter, chunks, aux, loss, backend)
        expected, before = gradients(drafter), len(ran)
        ran.clear()
        drafter.checkpoint_layers = True
        again = train_pack(drafter, chunks, aux, loss, backend)
        found = gradients(drafter)
        assert len(ran) == before + 3 * passes * len(chunks), "each layer ran once more, in the backward"
        ran.clear()
        assert torch.equal(again.loss, plain.loss)
        assert set(found) == set(expected) == {name for name, _ in drafter.named_parameters()}
        assert max(relative(found[name], expected[name]) for name in expected) < 1e-12


def test_compiled_layers_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = functools.cache(lambda function: torch.compile(function, dynamic=True, backend="aot_eager"))
    monkeypatch.setattr(fuse, "_compiled", compiled)
    drafter, pack = tiny_drafter("p-eagle", 2), tiny_pack()
    table = table_of(pack, "p-eagle", DEPTHS)
    aux, hidden = states(table.num_anchors)
    loss = chunk_loss(drafter, hidden, LossSettings("soft", DEPTHS))
    fuse.fuse_elementwise(drafter)
    found = []
    for on in (False, True):
        drafter.checkpoint_layers = on
        train_pack(drafter, chunks_of(pack, table, "p-eagle", 20, DEPTHS), aux, loss, "dense")
        found.append(gradients(drafter))
    assert max(relative(found[1][name], found[0][name]) for name in found[0]) < 1e-12


def test_nothing_runs_again_without_a_graph() -> None:
    drafter = tiny_drafter("p-eagle", 2)
    drafter.checkpoint_layers = True
    pack = tiny_pack()
    table = table_of(pack, "p-eagle", DEPTHS)
    chunk, aux = chunks_of(pack, table, "p-eagle", table.num_anchors, DEPTHS)[0], states(table.num_anchors)[0]
    with torch.no_grad():
        rows = RowAttention(chunk, "dense")
        without = forward_chunk(drafter, chunk, aux, rows)
    assert not without.requires_grad
    assert [len(made) for made in rows.passes.values()] == [1, 1]


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_layers_inside_is_not_kept(kind: str, checkpointed: bool) -> None:
    drafter = tiny_drafter(kind, 2)
    drafter.checkpoint_layers = checkpointed
    pack = tiny_pack()
    table = table_of(pack, kind, DEPTHS)
    chunk, aux = chunks_of(pack, table, kind, table.num_anchors, DEPTHS)[0], states(table.num_anchors)[0]
    inside: list[weakref.ref[Tensor]] = []
    for layer in drafter.layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: inside.append(weakref.ref(args[0])))
    rows = RowAttention(chunk, "dense")
    normed = forward_chunk(drafter, chunk, aux, rows)
    assert {held() is not None for held in inside} == {not checkpointed}
    # autograd's own references cannot be seen by the garbage collector: what is done must go without it
    alive = weakref.ref(rows)
    gc.disable()
    try:
        normed.sum().backward()
        del rows, normed
        assert alive() is None
        assert all(held() is None for held in inside)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_a_run_is_the_same_and_may_give_it_up_on_the_way(tmp_path: Path, kind: str) -> None:
    settings: dict[str, Any] = {"kind": kind, "chunk_size": 24, "layers": 2, "save_every": 4, "keep_checkpoints": 10}
    train_on(config(tmp_path / "plain", **settings), tiny_target(), listed_answers(40), say=quiet)
    said: list[str] = []
    run = config(tmp_path / "run", activation_checkpointing=True, **settings)
    train_on(run, tiny_target(), listed_answers(40), say=said.append)
    assert any("activation checkpointing" in line for line in said)
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    shutil.rmtree(sorted((tmp_path / "run" / "checkpoints").iterdir())[-1])  # as if it had been killed after step 8
    run.activation_checkpointing = False
    train_on(run, tiny_target(), listed_answers(40), say=said.append)
    assert "resumed at step 8" in said
    assert metrics(tmp_path / "run") == metrics(tmp_path / "plain")
    heads = [load_drafter(tmp_path / name / "head", kind=kind).state_dict() for name in ("plain", "run")]  # type: ignore[arg-type]
    assert all(torch.equal(heads[1][name], weight) for name, weight in heads[0].items())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes(tmp_path: Path, parallel: str) -> None:
    settings: dict[str, Any] = {"max_steps": 8, "packs_per_step": 3, "chunk_size": 24, "lr": 2e-4, "layers": 2}
    train_on(config(tmp_path / "one", **settings), tiny_target(), listed_answers(40), say=quiet)
    run_on(2, tmp_path / "two", settings | {"parallel": parallel, "activation_checkpointing": True})
    assert_same(tmp_path / "one", tmp_path / "two")


@pytest.mark.parametrize(("backend", "room"), [("dense", 2 << 30), ("flex", 16 << 20)])
def test_larger_chunks_fit(backend: Any, room: int) -> None:
    head = tiny_drafter("p-eagle", 4).config
    plain, again = (choose_chunk_size(head, 8192, 8, 0.8, backend, 2, room, on) for on in (False, True))
    assert plain < again <= 8192
