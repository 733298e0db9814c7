"""Greedy output with drafts equals plain decoding, which equals Transformers' generate."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from peagle.target import Target
from tests.engine.helpers import ASCII, SEQUENCES, assert_same, greedy, make_engine, replay, run, tiny_head

ANSWER = 40


def test_plain_equals_generate(target: Target, plain: list[list[int]], target_folder: Callable[[str], Path]) -> None:
    reference = AutoModelForCausalLM.from_pretrained(target_folder("llama"))
    with torch.no_grad():
        reference.lm_head.weight[ASCII:] = 0
    for prompt, answer in zip(SEQUENCES, plain, strict=True):
        ids = torch.tensor([prompt])
        generated = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
        )
        assert_same(target, prompt, generated[0, len(prompt) :].tolist(), answer)


@pytest.mark.parametrize("batched_tokens", [8, 1024])
@pytest.mark.parametrize("block_size", [1, 16])
def test_plain_in_a_batch(target: Target, plain: list[list[int]], block_size: int, batched_tokens: int) -> None:
    engine = make_engine(target, block_size=block_size, max_num_batched_tokens=batched_tokens)
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(ANSWER)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)


@pytest.mark.parametrize(("block_size", "batched_tokens"), [(1, 1024), (16, 16), (4, 8)])
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("k", [1, 3, 5, 7])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_drafts_change_nothing(
    target: Target, plain: list[list[int]], kind: str, k: int, batch: int, block_size: int, batched_tokens: int
) -> None:
    """With drafts that are right for 0 to K tokens, in turn."""
    engine = make_engine(
        target,
        tiny_head(target, kind),
        k,
        max_num_seqs=batch,
        block_size=block_size,
        max_num_batched_tokens=batched_tokens,
    )
    prompts = SEQUENCES if batch > 1 else SEQUENCES[4:6]
    answers = plain if batch > 1 else plain[4:6]
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))}
    order = torch.randperm(4 * (k + 1), generator=torch.Generator().manual_seed(k)) % (k + 1)
    replay(engine, known, order.tolist())
    for prompt, answer, request in zip(prompts, answers, run(engine, prompts, greedy(ANSWER)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)
    spec = engine.stats.spec
    assert len(spec.accepted_per_pos) == k
    # every length of run has occurred
    assert all(a > b for a, b in zip([spec.num_drafts, *spec.accepted_per_pos], spec.accepted_per_pos, strict=False))


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_own_drafts(target: Target, plain: list[list[int]], kind: str) -> None:
    """The random head's own drafts, with a reduced draft vocabulary and its own LM head and embeddings."""
    drafter = tiny_head(target, kind, draft_vocab_size=50, own_lm_head=True, own_embed_tokens=True)
    assert drafter.d2t is not None
    drafter.d2t.copy_(torch.arange(50))  # every second token
    engine = make_engine(target, drafter, 4)
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(ANSWER)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)
    assert sum(engine.stats.by_context.num_drafts.values()) == engine.stats.spec.num_drafts
    assert sum(engine.stats.by_context.num_accepted_tokens.values()) == engine.stats.spec.num_accepted_tokens
    assert engine.stats.spec.num_drafts > 100


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_preemption(target: Target, plain: list[list[int]], kind: str) -> None:
    """Requests that lose their blocks are computed again, without the drafts that stood."""
    k = 5
    engine = make_engine(target, tiny_head(target, kind), k, block_size=4, num_kv_blocks=40, max_model_len=96)
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    replay(engine, known, [5, 0, 3, 1])
    requests = run(engine, SEQUENCES, greedy(ANSWER))
    assert engine.stats.num_preemptions > 0
    for prompt, answer, request in zip(SEQUENCES, plain, requests, strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_requests_with_their_own_k(target: Target, plain: list[list[int]], kind: str) -> None:
    engine = make_engine(target, tiny_head(target, kind), 5)
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    replay(engine, known)
    ks = [0, 1, 5, None, 0, 3, 9, 2]
    requests = run(engine, SEQUENCES, [greedy(ANSWER, num_speculative_tokens=k) for k in ks])
    for prompt, answer, k, request in zip(SEQUENCES, plain, ks, requests, strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)
        wanted = 5 if k is None else min(k, 5)
        assert len(request.metrics.drafts_per_pos) == wanted
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens
    assert make_and_run_without_drafts(target)


def make_and_run_without_drafts(target: Target) -> bool:
    """A batch of only plain requests in a speculative engine leaves the drafter out."""
    engine = make_engine(target, tiny_head(target), 3)
    assert engine.runner.draft_pass is not None
    engine.runner.draft_pass.propose = None  # type: ignore[assignment]
    run(engine, SEQUENCES[:2], greedy(4, num_speculative_tokens=0))
    return engine.stats.spec.num_drafts == 0
