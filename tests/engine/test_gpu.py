"""The same on a GPU: padded draft batches, no question to the device within a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.engine import SamplingParams
from peagle.target import Target, load_target
from tests.engine.helpers import ASCII, SEQUENCES, assert_same, greedy, make_engine, replay, run, tiny_head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
ANSWER = 40


@pytest.fixture(scope="module")
def gpu_target(target_folder: Callable[[str], Path]) -> Target:
    loaded = load_target(str(target_folder("llama")), dtype="float32", device="cuda")
    with torch.no_grad():
        loaded.lm_head_weight[ASCII:] = 0
    return loaded


def head(target: Target, kind: str) -> Any:
    drafter = tiny_head(target, kind).to(target.device)
    drafter.bind(target.embed_weight, target.lm_head_weight)
    return drafter


@pytest.mark.parametrize("batched_tokens", [16, 1024])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_drafts_change_nothing(gpu_target: Target, kind: str, k: int, batched_tokens: int) -> None:
    plain = [r.output_token_ids for r in run(make_engine(gpu_target), SEQUENCES, greedy(ANSWER))]
    engine = make_engine(gpu_target, head(gpu_target, kind), k, max_num_batched_tokens=batched_tokens)
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    replay(engine, known, [k, 0, 1, k // 2, k])
    ks = [0, None, None, 1, None, None, None, None]
    requests = run(engine, SEQUENCES, [greedy(ANSWER, num_speculative_tokens=own) for own in ks])
    for prompt, answer, request in zip(SEQUENCES, plain, requests, strict=True):
        assert_same(gpu_target, prompt, answer, request.output_token_ids)


def test_seeded_tokens_depend_on_nothing_else(gpu_target: Target) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=i, top_k=20 * (i % 3), top_p=0.9 if i % 2 else 1.0)
        for i in range(len(SEQUENCES))
    ]
    alone = [run(make_engine(gpu_target), [p], s)[0] for p, s in zip(SEQUENCES, params, strict=True)]
    together = run(make_engine(gpu_target, head(gpu_target, "p-eagle"), 4), SEQUENCES, params)
    for prompt, one, other in zip(SEQUENCES, alone, together, strict=True):
        assert_same(gpu_target, prompt, one.output_token_ids, other.output_token_ids)
