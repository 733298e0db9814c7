"""The same on a GPU: padded draft batches, no question to the device within a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.engine import Engine, SamplingParams
from peagle.errors import InputError
from peagle.target import Target, load_target
from peagle.target.fused import fuse_decoder_layers
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


@pytest.mark.parametrize("settings", [{"enforce_eager": True}, {"async_scheduling": False}, {}])
@pytest.mark.parametrize("batched_tokens", [16, 1024])
@pytest.mark.parametrize("k", [1, 5])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_drafts_change_nothing(
    gpu_target: Target, kind: str, k: int, batched_tokens: int, settings: dict[str, Any]
) -> None:
    plain = [r.output_token_ids for r in run(make_engine(gpu_target, **settings), SEQUENCES, greedy(ANSWER))]
    engine = make_engine(gpu_target, head(gpu_target, kind), k, max_num_batched_tokens=batched_tokens, **settings)
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    replay(engine, known, [k, 0, 1, k // 2, k])
    ks = [0, None, None, 1, None, None, None, None]
    requests = run(engine, SEQUENCES, [greedy(ANSWER, num_speculative_tokens=own) for own in ks])
    for prompt, answer, request in zip(SEQUENCES, plain, requests, strict=True):
        assert_same(gpu_target, prompt, answer, request.output_token_ids)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_a_table_of_drafts(gpu_target: Target, kind: str) -> None:
    """Without graphs the number of drafts may change; rows that were put off are made up on the device."""
    plain = [r.output_token_ids for r in run(make_engine(gpu_target), SEQUENCES, greedy(ANSWER))]
    config = EngineConfig(max_num_seqs=8, max_model_len=128, block_size=4, enforce_eager=True)
    engine = Engine(gpu_target, head(gpu_target, kind), 3, config, None, ((1, 2, 3), (3, 5, 1), (6, 8, 0)))
    known = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    replay(engine, known, [3, 0, 2, 1])
    lengths = [40, 3, 12, 17, 1, 9, 20, 12]
    requests = run(engine, SEQUENCES, [greedy(n) for n in lengths])
    for prompt, answer, length, request in zip(SEQUENCES, plain, lengths, requests, strict=True):
        assert_same(gpu_target, prompt, answer[:length], request.output_token_ids)
    assert len(engine.stats.spec.drafts_per_pos) == 3
    with pytest.raises(InputError, match="enforce_eager"):
        Engine(gpu_target, head(gpu_target, kind), 3, None, None, ((1, 8, 1),))


def test_seeded_tokens_depend_on_nothing_else(gpu_target: Target) -> None:
    params = [
        SamplingParams(max_tokens=24, temperature=1.0, seed=i, top_k=20 * (i % 3), top_p=0.9 if i % 2 else 1.0)
        for i in range(len(SEQUENCES))
    ]
    alone = [run(make_engine(gpu_target), [p], s)[0] for p, s in zip(SEQUENCES, params, strict=True)]
    together = run(make_engine(gpu_target, head(gpu_target, "p-eagle"), 4), SEQUENCES, params)
    for prompt, one, other in zip(SEQUENCES, alone, together, strict=True):
        assert_same(gpu_target, prompt, one.output_token_ids, other.output_token_ids)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("k", [1, 3, 7])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_captured_steps_equal_eager_ones(gpu_target: Target, kind: str, k: int, window: int | None) -> None:
    """The head's own drafts, greedy and sampled: same tokens, same acceptance, all graphs recorded beforehand."""
    params = [
        SamplingParams(max_tokens=ANSWER - 2 * i, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(SEQUENCES))
    ]
    drafter = head(gpu_target, kind)
    results = []
    for eager in (True, False):
        engine = make_engine(gpu_target, drafter, k, draft_window=window, block_size=4, enforce_eager=eager)
        engine.capture()
        requests = run(engine, SEQUENCES, params)
        results.append([(r.output_token_ids, r.metrics) for r in requests])
    assert engine.runner.decode is not None
    recorded = [key for key in engine.runner.decode.graphs.keys() if key[0] == "decode"]  # noqa: SIM118
    assert len(recorded) == 2 * len(engine.runner.decode.sizes)
    for prompt, (expected, _), (ours, _) in zip(SEQUENCES, *results, strict=True):
        assert_same(gpu_target, prompt, expected, ours)
    assert [metrics for _, metrics in results[0]] == [metrics for _, metrics in results[1]]


def test_nothing_waits_for_the_device_within_a_step(gpu_target: Target) -> None:
    """Neither in a replayed step nor in an ordinary one, but for fetching what it decided."""
    engine = make_engine(gpu_target, head(gpu_target, "p-eagle"), 3)
    for i in range(4):
        engine.add_request(str(i), SEQUENCES[i], greedy(ANSWER))
    for _ in range(5):
        engine.step()
    assert engine._flight is not None
    schedule, _ = engine._flight
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ahead = engine.scheduler.repeat(schedule)
        assert ahead is not None
        engine.runner.repeat(ahead.plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_nor_does_a_step_with_prompts(gpu_target: Target) -> None:
    """Greedy and sampled, beside requests that decode: everything recorded, nothing read back."""
    engine = make_engine(gpu_target, head(gpu_target, "p-eagle"), 3, async_scheduling=False)
    engine.capture()
    for i in range(3):
        engine.add_request(str(i), SEQUENCES[i], greedy(ANSWER))
    for _ in range(3):
        engine.step()
    for temperature in (0.0, 1.0):
        engine.add_request(f"late {temperature}", SEQUENCES[3], SamplingParams(max_tokens=9, temperature=temperature))
        schedule = engine.scheduler.schedule()
        assert max(schedule.plan.query_lens) == len(SEQUENCES[3])
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = engine.runner.launch(schedule.plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine._advance(schedule, launched.wait())
    assert engine.runner.mixed is not None
    assert {key[0] for key in engine.runner.mixed.graphs.keys()} == {"decode", "target", "verify", "drafter"}  # noqa: SIM118


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_fused_layers_change_nothing(target_folder: Callable[[str], Path], architecture: str) -> None:
    """Over prompts and captured steps alike, with a float8 cache too."""
    targets = [load_target(str(target_folder(architecture)), dtype="float32", device="cuda") for _ in range(2)]
    assert fuse_decoder_layers(targets[1]) == 7
    for dtype in ("auto", "fp8"):
        answers = []
        for target in targets:
            engine = make_engine(target, head(target, "p-eagle"), 3, kv_cache_dtype=dtype)
            answers.append([r.output_token_ids for r in run(engine, SEQUENCES, greedy(ANSWER))])
        if dtype == "auto":  # a rounding to float8 may fall to the other side
            for prompt, expected, ours in zip(SEQUENCES, *answers, strict=True):
                assert_same(targets[0], prompt, expected, ours)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_early_launches_change_nothing(target_folder: Callable[[str], Path], architecture: str) -> None:
    """The kernels of a chain one after the other, and launched early: the same tokens exactly."""
    from peagle.kernels.chained_layer import Chain, use_chain

    target = load_target(str(target_folder(architecture)), dtype="bfloat16", device="cuda")
    fuse_decoder_layers(target)
    drafter, answers = head(target, "p-eagle").to(torch.bfloat16), []
    try:
        for is_early in (False, True, True):
            use_chain(Chain(is_early=is_early))
            engine = make_engine(target, drafter, 3)
            answers.append([r.output_token_ids for r in run(engine, SEQUENCES[:2], greedy(ANSWER))])
    finally:
        use_chain("tuned")
    assert answers[1] == answers[0]
    assert answers[2] == answers[0]
