"""Acceptance depends on the head and the text alone: not on chunks, blocks, the prefix cache, nor on how the head keeps
its vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter import Drafter
from peagle.engine.stats import SpecMetrics
from peagle.target import Target, load_target
from tests.engine.helpers import greedy, make_engine, run, tiny_head

K = 3
WORDS = range(40, 46)
KINDS = pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])


@pytest.fixture(scope="module")
def narrow(target_folder: Callable[[str], Path]) -> Target:
    """The tiny Llama with logits for WORDS alone (all others are 0, so that it may say token 0 as well): a random head
    is right every few times."""
    loaded = load_target(str(target_folder("llama")), device="cpu")
    kept = torch.zeros(loaded.vocab_size, 1)
    kept[WORDS.start : WORDS.stop] = 1
    with torch.no_grad():
        loaded.lm_head_weight.mul_(kept)
    return loaded


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    common = torch.randint(0, 94, (24,), generator=generator).tolist()
    ends = [torch.randint(0, 94, (n,), generator=generator).tolist() for n in (1, 6, 17)]
    return [common + end for end in ends]


def acceptance(
    target: Target, drafter: Drafter, prompts: list[list[int]], rounds: int = 1, **config: Any
) -> list[tuple[list[int], SpecMetrics]]:
    """Tokens and counts of each prompt, one at a time; of the last of several rounds."""
    blocks = 512 // config.get("block_size", 16)
    engine = make_engine(target, drafter, K, **({"max_num_seqs": 1, "num_kv_blocks": blocks} | config))
    for _ in range(rounds):
        requests = run(engine, prompts, greedy(30))
    if rounds > 1 and engine.config.enable_prefix_caching:
        assert engine.stats.prefix_cache_hits > 0
    return [(request.output_token_ids, request.metrics) for request in requests]


@pytest.mark.parametrize("window", [None, 9])
@KINDS
def test_chunks_blocks_and_the_prefix_cache(
    narrow: Target, prompts: list[list[int]], kind: str, window: int | None
) -> None:
    drafter, prompts = tiny_head(narrow, kind, max_train_length=window), prompts[1:]
    whole = acceptance(narrow, drafter, prompts, enable_prefix_caching=False, enable_chunked_prefill=False)
    assert sum(metrics.num_accepted_tokens for _, metrics in whole) > 3
    for batched_tokens, block_size in ((K + 1, 1), (1024, 16)):
        sizes = {"max_num_batched_tokens": batched_tokens, "block_size": block_size}
        assert acceptance(narrow, drafter, prompts, **sizes, enable_prefix_caching=False) == whole
        assert acceptance(narrow, drafter, prompts, **sizes, rounds=2) == whole  # every prompt hits


@KINDS
def test_batches(narrow: Target, prompts: list[list[int]], kind: str) -> None:
    drafter = tiny_head(narrow, kind)
    alone = acceptance(narrow, drafter, prompts)
    assert acceptance(narrow, drafter, prompts, max_num_seqs=3) == alone


@KINDS
def test_how_a_head_keeps_its_vocabulary(narrow: Target, prompts: list[list[int]], kind: str) -> None:
    """The target's LM head, a copy of it, and its rows for the few tokens that occur, which have offsets."""
    shared = tiny_head(narrow, kind)
    own = tiny_head(narrow, kind, own_lm_head=True)
    own.load_state_dict(shared.state_dict(), strict=False)
    assert own.lm_head is not None
    with torch.no_grad():
        own.lm_head.weight.copy_(narrow.lm_head_weight)
    reduced = tiny_head(narrow, kind, draft_vocab_size=1 + len(WORDS))
    reduced.load_state_dict({k: v for k, v in shared.state_dict().items() if k not in ("d2t", "t2d")}, strict=False)
    assert reduced.d2t is not None
    reduced.d2t.copy_(torch.tensor([0, *WORDS]) - torch.arange(1 + len(WORDS)))
    reduced.bind(narrow.embed_weight, narrow.lm_head_weight)
    expected = acceptance(narrow, shared, prompts)
    assert acceptance(narrow, own, prompts) == expected
    assert acceptance(narrow, reduced, prompts) == expected
    reduced.d2t.zero_()  # without the offsets its drafts are other tokens, which the target never says
    reduced.bind(narrow.embed_weight, narrow.lm_head_weight)
    wrong = acceptance(narrow, reduced, prompts)
    assert [tokens for tokens, _ in wrong] == [tokens for tokens, _ in expected]
    assert sum(m.num_accepted_tokens for _, m in wrong) < sum(m.num_accepted_tokens for _, m in expected)
