"""A whole fixed-shape step made of the Triton kernels, as on a GPU, interpreted on the CPU: same tokens and counts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle.engine import Engine, SamplingParams, fused_drafter
from peagle.engine.fused_drafter import FusedDrafter
from peagle.kernels import fused_layer
from peagle.target import Target, load_target, paged_attention
from peagle.target import fused as target_fused
from peagle.target.fused import fuse_decoder_layers
from tests.engine.helpers import ASCII, SEQUENCES, greedy, make_engine, run, tiny_head

pytest.importorskip("triton")
from peagle.kernels import draft_batch_triton, fused_layer_triton
from peagle.kernels.attention_table import DecodeConfig
from peagle.kernels.chained_layer import Chain
from peagle.kernels.decode_attention import decode_attention_triton
from peagle.kernels.paged_attention import paged_attention_triton, write_kv_triton
from peagle.kernels.skinny_linear import MAX_ROWS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them compiled, in test_gpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that has a kernel takes it; steps that only decode run in fixed shapes."""

    def write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *_: Any) -> None:
        write_kv_triton(k, v, k_cache.view(-1, *k.shape[1:]), v_cache.view(-1, *v.shape[1:]), slots)

    def attend(q: Tensor, cache: tuple[Tensor, Tensor], batch: Any, *args: Any) -> Tensor:
        return paged_attention_triton(q, *cache, batch, *args, num_splits=2 if batch.max_query_len <= 8 else 1)

    def rope(*args: Any) -> Tensor:
        return fused_layer_triton.rope_and_write_triton(*args[:-1], args[-1].slot_mapping)

    monkeypatch.setattr(paged_attention, "write_kv", write)
    monkeypatch.setattr(paged_attention, "attend_written", attend)
    monkeypatch.setattr(fused_layer, "attend_written", attend)
    monkeypatch.setattr(fused_layer, "rope_and_write", rope)
    for module in (target_fused, fused_drafter):
        monkeypatch.setattr(module, "rope_rows", lambda cos, sin: (cos, sin))
    monkeypatch.setattr(fused_layer, "add_rms_norm", fused_layer_triton.add_rms_norm_triton)
    monkeypatch.setattr(fused_layer, "silu_and_mul", fused_layer_triton.silu_and_mul_triton)
    for name in ("expand_draft_batch", "expand_draft_batch_on_host"):
        monkeypatch.setattr(f"peagle.engine.drafting.{name}", draft_batch_triton.expand_draft_batch_triton)
    monkeypatch.setattr("peagle.engine.drafting.copy_hidden_states", draft_batch_triton.copy_hidden_states_triton)
    monkeypatch.setattr("peagle.engine.engine.captured_rows", lambda *_: 1024)


def facts(engine: Engine, params: SamplingParams) -> list[Any]:
    return [(r.output_token_ids, r.metrics) for r in run(engine, SEQUENCES[:3], params)]


def attend_in_one_tile(q: Tensor, cache: tuple[Tensor, Tensor], batch: Any, scale: float, *args: Any) -> Tensor:
    return decode_attention_triton(q, *cache, batch, scale, DecodeConfig(16, 4, 2, num_splits=2), *args)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "one_tile", "chained"),
    [("p-eagle", False, False), ("p-eagle", True, False), ("p-eagle", False, True), ("eagle3", False, False)],
)
def test_same_as_eager(
    target_folder: Callable[[str], Path],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    one_tile: bool,
    chained: bool,
) -> None:
    target: Target = load_target(str(target_folder("llama")), device="cpu")
    with torch.no_grad():
        target.lm_head_weight[ASCII:] = 0
    drafter = tiny_head(target, kind, draft_vocab_size=8, own_lm_head=True)
    expected = facts(make_engine(target, drafter, 3), greedy(12))
    request.getfixturevalue("as_on_a_gpu")
    if one_tile:
        for module in (paged_attention, fused_layer):
            monkeypatch.setattr(module, "attend_written", attend_in_one_tile)
    if chained:
        chain = Chain(is_early=False)
        for layers in (target_fused, fused_drafter):
            monkeypatch.setattr(layers, "chain_for", lambda x, _: chain if len(x) <= MAX_ROWS else None)
    fuse_decoder_layers(target)
    engine = make_engine(target, drafter, 3)
    assert engine.runner.draft_pass is not None
    engine.runner.draft_pass.fused = FusedDrafter(drafter, 128)
    assert facts(engine, greedy(12)) == expected
    assert sum(metrics.num_accepted_tokens for _, metrics in expected) > 0
