"""A target whose weights float16 holds exactly: read from float16 on a CPU, and the same model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peagle.engine.loading import prepare_drafter, prepare_for_inference
from peagle.kernels.half_linear import HalfLinear, has_half
from peagle.kernels.packed_linear import PackedLinear
from peagle.target import Target, load_target
from tests.conftest import ARCHITECTURES
from tests.engine.helpers import SEQUENCES, assert_same, greedy, make_engine, replay, run, tiny_head
from tests.target.paging import Paged, Rows, dense

pytestmark = pytest.mark.skipif(not has_half(), reason="this build of PyTorch has no FBGEMM")

AUX = (0, 3, 6)
PRODUCTS = 7 * 4 + 1  # of seven layers with q, k and v joined, and gate and up; the LM head


@torch.no_grad()
def rounded(folder: Path, dtype: torch.dtype = torch.float16) -> Target:
    """The target with weights of a checkpoint in `dtype`."""
    target = load_target(str(folder), device="cpu")
    for parameter in target.model.parameters():
        parameter.copy_(parameter.to(dtype))
    return target


def count(target: Target, kind: type) -> int:
    return sum(isinstance(module, kind) for module in target.model.modules())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_equals_the_models_own(target_folder: Callable[[str], Path], architecture: str) -> None:
    """Over the paged cache, alone and with others, one row and many; densely too."""
    target = rounded(target_folder(architecture))
    tokens = torch.randint(0, 300, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    before, aux_before = dense(target, tokens, AUX)
    prepare_for_inference(target)
    prepare_for_inference(target)
    assert count(target, HalfLinear) > 7
    assert count(target, PackedLinear) == 0
    after, aux_after = dense(target, tokens, AUX)
    torch.testing.assert_close(after, before, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(aux_after, aux_before, atol=2e-4, rtol=2e-4)
    paged = Paged(target, 2, 40, 4)
    logits, aux = [], []
    for start, end in ((0, 11), (11, 12), (12, 14), (14, 21), (21, 30)):
        steps = [Rows(0, start, tokens[start:end])] + ([Rows(1, 0, tokens[:3])] if start == 12 else [])
        (one, states), *_ = paged.run(steps, AUX)
        assert states is not None
        logits.append(one)
        aux.append(states)
    torch.testing.assert_close(torch.cat(logits), before, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(torch.cat(aux), aux_before, atol=2e-4, rtol=2e-4)


def test_each_weight_is_looked_at(target_folder: Callable[[str], Path]) -> None:
    """Those that float16 would round stay float32; bfloat16's are exact where they are not tiny."""
    target = rounded(target_folder("llama"))
    with torch.no_grad():
        target.layers[2].mlp.up_proj.weight[3, 5] = 1 + 2**-15
        target.lm_head_weight[7, 0] = 1e6
    prepare_for_inference(target)
    assert count(target, PackedLinear) == 2
    assert count(target, HalfLinear) == PRODUCTS - 2

    low = rounded(target_folder("llama"), torch.bfloat16)
    with torch.no_grad():
        low.layers[4].self_attn.o_proj.weight[0, 0] = 1e-7  # float16 has few bits there
    prepare_for_inference(low)
    assert count(low, HalfLinear) == PRODUCTS - 1
    assert count(low, PackedLinear) == 1

    other = load_target(str(target_folder("llama")), device="cpu")
    prepare_for_inference(other)
    assert count(other, HalfLinear) == 0


def test_one_lm_head_for_target_and_drafter(target_folder: Callable[[str], Path]) -> None:
    target = rounded(target_folder("llama"))
    weight = target.lm_head_weight
    prepare_for_inference(target)
    assert target.lm_head_weight is weight
    drafter = prepare_drafter(tiny_head(target), target)
    head = target.model.get_output_embeddings()
    assert isinstance(head, HalfLinear)
    assert target.draft_lm_head is head.product
    rows = torch.randn(7, target.hidden_size)
    torch.testing.assert_close(drafter.logits(rows), rows @ weight.T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_greedy_output_is_plain_decodings(target_folder: Callable[[str], Path], kind: str) -> None:
    target = rounded(target_folder("llama"))
    prepare_for_inference(target)
    answers = [request.output_token_ids for request in run(make_engine(target), SEQUENCES, greedy(30))]
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, answers, strict=True))}
    for k in (1, 3, 6):
        engine = make_engine(target, prepare_drafter(tiny_head(target, kind), target), k, block_size=4)
        replay(engine, known, [j % (k + 1) for j in (0, 5, 2, 7, 1, 3, 6, 4)])
        requests = run(engine, SEQUENCES, greedy(30))
        for prompt, answer, request in zip(SEQUENCES, answers, requests, strict=True):
            assert_same(target, prompt, answer, request.output_token_ids)
