"""A drafter with float16 weights on the CPU: near the exact one, and of no effect on what is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peagle.config.speculative import SpeculativeConfig
from peagle.drafter import Drafter, save_drafter
from peagle.engine import SamplingParams
from peagle.engine.loading import load_bound_drafter, load_engine, prepare_drafter
from peagle.errors import InputError
from peagle.kernels.half_linear import HalfLinear, has_half
from peagle.target import Target, load_target
from tests.engine.helpers import SEQUENCES, assert_same, greedy, make_engine, replay, run, tiny_head
from tests.engine.test_drafter_rows import PROMPT, dense_eagle3, dense_p_eagle, record

pytestmark = pytest.mark.skipif(not has_half(), reason="this build of PyTorch has no FBGEMM")

PRODUCTS = 2 * 4 + 1  # of two layers with q, k and v joined, and gate and up; fc
KINDS = pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])


def halved(target: Target, kind: str, **over: object) -> Drafter:
    return prepare_drafter(tiny_head(target, kind, **over), target, "float16")


def count_halved(drafter: Drafter) -> int:
    return sum(isinstance(module, HalfLinear) for module in drafter.modules())


@KINDS
@pytest.mark.parametrize(("weight_dtype", "tolerance"), [("target", 1e-4), ("float16", 2e-2)])
def test_logits_against_a_dense_forward(
    target: Target, plain: list[list[int]], kind: str, weight_dtype: str, tolerance: float
) -> None:
    drafter = prepare_drafter(tiny_head(target, kind), target, weight_dtype)  # type: ignore[arg-type]
    assert count_halved(drafter) == (0 if weight_dtype == "target" else PRODUCTS)
    engine = make_engine(target, drafter, 5, block_size=4)
    replay(engine, {"0": PROMPT + plain[5]}, [0, 3, 5, 1, 4, 2])
    steps = record(engine)
    (request,) = run(engine, [PROMPT], greedy(30))
    exact, tokens = tiny_head(target, kind), request.token_ids
    with torch.inference_mode():
        aux = target.encode(torch.tensor([tokens]), exact.config.aux_hidden_state_layer_ids).aux[0]
        dense = dense_p_eagle if kind == "p-eagle" else dense_eagle3
        assert len(steps) > 8
        for anchor, logits in steps:
            expected = dense(exact, tokens, aux, anchor, len(logits) if kind == "p-eagle" else 1)
            torch.testing.assert_close(logits[: len(expected)], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("k", [1, 3, 5, 7])
@KINDS
def test_greedy_output_is_plain_decodings(
    target: Target, plain: list[list[int]], kind: str, k: int, batch: int
) -> None:
    """With drafts that are right for 0 to K tokens, in turn."""
    engine = make_engine(target, halved(target, kind), k, max_num_seqs=batch, block_size=4)
    prompts, answers = (SEQUENCES, plain) if batch > 1 else (SEQUENCES[4:6], plain[4:6])
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))}
    replay(engine, known, [j % (k + 1) for j in (0, 5, 2, 7, 1, 3, 6, 4)])
    for prompt, answer, request in zip(prompts, answers, run(engine, prompts, greedy(40)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)


@KINDS
def test_sampled_output_is_plain_decodings(target: Target, kind: str) -> None:
    """A seeded request draws with the noise of its positions, whatever is drafted (engine/verification.py)."""
    params = [SamplingParams(max_tokens=20, temperature=1.0, seed=i, ignore_eos=True) for i in range(len(SEQUENCES))]
    expected = run(make_engine(target), SEQUENCES, params)
    engine = make_engine(target, halved(target, kind), 4)
    for one, other in zip(expected, run(engine, SEQUENCES, params), strict=True):
        assert one.output_token_ids == other.output_token_ids
    assert engine.stats.spec.num_drafts > 0


@KINDS
def test_a_reduced_vocabulary(target: Target, plain: list[list[int]], kind: str) -> None:
    """Rows of the target's LM head: their fp32 copy goes, and the drafts are those of the exact head."""

    def make() -> Drafter:
        drafter = tiny_head(target, kind, draft_vocab_size=50)
        assert drafter.d2t is not None
        drafter.d2t.copy_(torch.arange(50))
        drafter.bind(target.embed_weight, target.lm_head_weight)
        return drafter

    exact, half = make(), prepare_drafter(make(), target)
    assert half.bound
    rows = torch.randn(7, target.hidden_size)
    torch.testing.assert_close(half.logits(rows), exact.logits(rows), atol=1e-2, rtol=1e-2)
    with pytest.raises(KeyError):
        half.lm_head_weight()
    (request,) = run(make_engine(target, half, 4), [SEQUENCES[5]], greedy(40))
    assert_same(target, SEQUENCES[5], plain[5], request.output_token_ids)


@KINDS
def test_loading(target_folder: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    """On by default on a CPU in float32; heads of one target share one LM head."""
    folder = str(target_folder("llama"))
    loaded = load_target(folder, device="cpu")
    head = str(save_drafter(tiny_head(loaded, kind), tmp_path / kind))
    engine = load_engine(loaded, {"model": head, "num_speculative_tokens": 3})
    assert engine.drafter is not None
    assert count_halved(engine.drafter) == PRODUCTS
    assert engine.drafter.fc.weight is not None
    assert not any("lm_head" in name for name in engine.drafter.state_dict())
    shared = loaded.draft_lm_head
    assert shared is not None
    load_bound_drafter(loaded, SpeculativeConfig(head, 3))
    assert loaded.draft_lm_head is shared

    again = load_target(folder, device="cpu")
    exact = load_bound_drafter(again, SpeculativeConfig(head, 3, draft_weight_dtype="target"))
    assert count_halved(exact) == 0
    assert again.draft_lm_head is None

    low = load_target(folder, "bfloat16", "cpu")
    assert count_halved(load_bound_drafter(low, SpeculativeConfig(head, 3))) == 0
    with pytest.raises(InputError, match="draft_weight_dtype: got 'float16' with a bfloat16 target on cpu"):
        load_bound_drafter(low, SpeculativeConfig(head, 3, draft_weight_dtype="float16"))


def test_an_own_lm_head(target: Target) -> None:
    drafter = halved(target, "p-eagle", own_lm_head=True, own_embed_tokens=True)
    assert count_halved(drafter) == PRODUCTS + 1
    exact = tiny_head(target, "p-eagle", own_lm_head=True, own_embed_tokens=True)
    rows = torch.randn(7, target.hidden_size)
    torch.testing.assert_close(drafter.logits(rows), exact.logits(rows), atol=1e-2, rtol=1e-2)


def test_a_target_whose_lm_head_does_not_fit(target_folder: Callable[[str], Path]) -> None:
    loaded = load_target(str(target_folder("llama")), device="cpu")
    with torch.no_grad():
        loaded.lm_head_weight[7, 0] = 1e6
    drafter = prepare_drafter(tiny_head(loaded, "p-eagle"), loaded)
    assert loaded.draft_lm_head is None
    rows = torch.randn(3, loaded.hidden_size)
    torch.testing.assert_close(drafter.logits(rows), rows @ loaded.lm_head_weight.T, atol=1.0, rtol=1e-4)


def test_refused() -> None:
    with pytest.raises(InputError, match="draft_weight_dtype: got 'int8', expected one of auto, target, float16"):
        SpeculativeConfig("head", 3, draft_weight_dtype="int8")  # type: ignore[arg-type]
