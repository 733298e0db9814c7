"""Steps with prompts in them, their passes padded as CUDA graphs need it, give what unpadded ones do.

They run unrecorded on the CPU here, alone and beside decoding steps in fixed shapes. captured: rows of logits that a
recorded verification takes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.drafter import Drafter
from peagle.engine import Engine, SamplingParams
from peagle.engine.checks import mixed_rows
from peagle.engine.fixed_choice import GREEDY, SAMPLED
from peagle.engine.mixed_step import MixedStep
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, greedy, make_engine, run, tiny_head

Padded = Callable[..., Engine]


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> Padded:
    """padded(target, head, k, rows, captured, **config): an engine whose steps of up to `rows` rows run padded."""

    def make(target: Target, drafter: Drafter | None, k: int, rows: int, captured: int = 0, **config: Any) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("peagle.engine.engine.mixed_rows", lambda *_: rows)
            patch.setattr("peagle.engine.engine.captured_rows", lambda *_: captured)
            return make_engine(target, drafter, k, **config)

    return make


def count_sizes(engine: Engine) -> list[tuple[str | int, ...]]:
    """The keys of the passes that run from now on."""
    step, found = engine.runner.mixed, []
    assert isinstance(step, MixedStep)
    inner = step._run

    def counted(key: tuple[str | int, ...], function: object) -> None:
        found.append(key)
        inner(key, function)

    step._run = counted  # type: ignore[method-assign]
    return found


def facts(engine: Engine, params: list[SamplingParams]) -> list[Any]:
    requests = run(engine, SEQUENCES, params)
    return [
        (r.output_token_ids, r.finish_reason, r.metrics, r.logprobs is None or [list(x) for x in r.logprobs])
        for r in requests
    ]


@pytest.mark.parametrize("unrecorded", [False, True])
@pytest.mark.parametrize("captured", [0, 1024])
@pytest.mark.parametrize(("kind", "k"), [("p-eagle", 1), ("p-eagle", 5), ("eagle3", 4), (None, 0)])
def test_same_tokens_and_acceptance(
    target: Target, padded: Padded, kind: str | None, k: int, captured: int, unrecorded: bool
) -> None:
    """Prompts in chunks beside requests that decode; one drafts less, one not at all, some sample; unrecorded: some
    have their logits changed or reported too. Larger steps than the limit run as they are."""
    # a small draft vocabulary makes some drafts of a random head right
    head = None if kind is None else tiny_head(target, kind, draft_vocab_size=8, own_lm_head=True)
    sampled: dict[str, Any] = {"temperature": 0.7, "seed": 3}
    others: list[dict[str, Any]] = [{}, sampled, {}, {}, sampled | {"top_k": 9}]
    if unrecorded:
        others = [{}, {"presence_penalty": 0.5}, {"logprobs": 2}, {"min_tokens": 4}, sampled]
    params = [
        SamplingParams(max_tokens=24 - i, ignore_eos=True, **({"temperature": 0.0} | others[i % 5]))
        for i in range(len(SEQUENCES))
    ]
    if k:
        for i, own in ((1, 0), (4, 1)):
            params[i] = replace(params[i], num_speculative_tokens=own)
    config = {"max_num_batched_tokens": 40, "max_num_seqs": 5, "block_size": 4}
    expected = facts(make_engine(target, head, k, **config), params)
    engine = padded(target, head, k, 24, captured, **config)
    sizes = count_sizes(engine)
    assert facts(engine, params) == expected
    verified = {key[2] for key in sizes if key[0] == "verify"}
    assert (SAMPLED in verified) == (captured > 0 and not unrecorded)
    if not captured:  # else decoding steps have a shape of their own
        assert {key[1] for key in sizes if key[0] == "target"} == ({16, 24} if k else {16})
        assert {key[2] for key in sizes if key[0] == "drafter"} == ({4, 5} if k else set())


@pytest.mark.parametrize("captured", [0, 16, 1024])
def test_synthetic_acceptance(target: Target, padded: Padded, captured: int) -> None:
    """Also where not every batch's verification is recorded: two requests of four rows are 16 rows of logits."""
    config: dict[str, Any] = {"max_num_batched_tokens": 40, "max_num_seqs": 4, "block_size": 4}
    config["synthetic_rates"] = (0.8, 0.5, 0.25)
    params = [greedy(20 - i) for i in range(len(SEQUENCES))]
    expected = facts(make_engine(target, tiny_head(target), 3, **config), params)
    engine = padded(target, tiny_head(target), 3, 24, captured, **config)
    sizes = count_sizes(engine)
    assert facts(engine, params) == expected
    assert {key[2] for key in sizes if key[0] == "verify"} == ({GREEDY} if captured else set())


def test_a_prompt_in_many_parts(target: Target, padded: Padded) -> None:
    """Steps that choose no token at all, and parts that are a part of a block."""
    prompt, params = list(range(1, 60)), [greedy(8)]
    config: dict[str, Any] = {"max_num_batched_tokens": 7, "block_size": 4}
    expected = run(make_engine(target, tiny_head(target), 3, **config), [prompt], params)[0]
    found = run(padded(target, tiny_head(target), 3, 16, 64, **config), [prompt], params)[0]
    assert (found.output_token_ids, found.metrics) == (expected.output_token_ids, expected.metrics)


def test_capturing_writes_nothing(target: Target, padded: Padded) -> None:
    engine = padded(target, tiny_head(target), 4, 40, max_num_seqs=6)
    assert engine.runner.mixed is not None
    pools = [*engine.runner.kv_cache, *engine.runner.draft_pass.kv_cache]  # type: ignore[union-attr]
    sizes = count_sizes(engine)
    with torch.inference_mode():
        for pool in pools:
            for part in pool:
                part.fill_(3.0)
        engine.runner.mixed.capture_all()
    assert all(bool((part == 3.0).all()) for pool in pools for part in pool)
    assert sizes.count(("target", 40)) == 2
    assert {key for key in sizes if key[0] == "drafter"} == {("drafter", r, n) for r in (16, 32, 40) for n in (4, 6)}
    before = facts(make_engine(target, tiny_head(target), 4, max_num_seqs=6), [greedy(12)] * len(SEQUENCES))
    assert facts(engine, [greedy(12)] * len(SEQUENCES)) == before


def test_requests_are_no_more_than_rows(target: Target, padded: Padded) -> None:
    step = padded(target, tiny_head(target), 2, 64, max_num_seqs=200).runner.mixed
    assert step is not None
    assert step.rows == (16, 32, 64)
    assert [step._requests_within(rows) for rows in step.rows] == [[4, 16], [4, 16, 64], [4, 16, 64]]


def test_on_a_gpu_unless_switched_off() -> None:
    gpu, cpu, small, large = torch.device("cuda"), torch.device("cpu"), 10**8, 8 * 10**9
    assert mixed_rows(EngineConfig(), cpu, 8192, small) == 0
    assert mixed_rows(EngineConfig(), gpu, 10**5, small) == 8192
    assert mixed_rows(EngineConfig(), gpu, 256, small) == 256
    assert mixed_rows(EngineConfig(), gpu, 8192, large) == 750
    assert mixed_rows(EngineConfig(), gpu, 8192, 10 * large) == 512
    assert mixed_rows(EngineConfig(max_cudagraph_capture_size=64), gpu, 8192, small) == 64
    assert mixed_rows(EngineConfig(max_cudagraph_capture_size=0), gpu, 8192, small) == 0
    assert mixed_rows(EngineConfig(enforce_eager=True), gpu, 8192, small) == 0
