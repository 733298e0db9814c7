"""Steps in fixed shapes, the form that CUDA graphs record, give the tokens and acceptance of steps in ragged ones.

They run unrecorded on the CPU here, with the host waiting for each step and with the host one step behind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.drafter import Drafter
from peagle.engine import Engine, SamplingParams
from peagle.engine.checks import captured_rows, runs_ahead
from peagle.engine.graphs import capture_sizes
from peagle.engine.request import Request
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, drain, greedy, make_engine, replay, run, tiny_head

Fixed = Callable[..., Engine]


@pytest.fixture
def fixed(monkeypatch: pytest.MonkeyPatch) -> Fixed:
    """fixed(target, head, k, **config): an engine that runs in fixed shapes, and counts the steps that do."""

    def make(target: Target, drafter: Drafter | None, k: int, rows: int = 1024, **config: Any) -> Engine:
        with monkeypatch.context() as patch:
            patch.setattr("peagle.engine.engine.captured_rows", lambda *_: rows)
            patch.setattr("peagle.engine.engine.runs_ahead", lambda config, _: config.async_scheduling)
            engine = make_engine(target, drafter, k, **config)
        step = engine.runner.decode
        assert step is not None
        inner = step._run

        def counted(num_steps: int) -> Any:
            step.count += 1  # type: ignore[union-attr]
            return inner(num_steps)

        step.count = 0  # type: ignore[attr-defined]
        step._run = counted  # type: ignore[method-assign]
        return engine

    return make


def by_position(k: int) -> Callable[[int], int]:
    """How many drafts are right, the same whatever the order of steps."""
    return lambda position: (position * 7 + position // 3) % (k + 2)


def facts(requests: list[Request]) -> list[Any]:
    return [(r.output_token_ids, r.finish_reason, r.metrics) for r in requests]


def compare(
    make: Callable[..., Engine],
    target: Target,
    drafter: Drafter | None,
    k: int,
    params: list[SamplingParams],
    answers: dict[str, list[int]] | None = None,
    behind: bool = False,
    **config: Any,
) -> Engine:
    """Run SEQUENCES both ways; the fixed engine, which must have run most of its steps in fixed shapes."""
    results = []
    engines = [
        make_engine(target, drafter, k, **config),
        make(target, drafter, k, async_scheduling=behind, **config),
    ]
    for engine in engines:
        if answers is not None:
            replay(engine, answers, by_position(k))
        results.append(facts(run(engine, SEQUENCES, params)))
    assert results[1] == results[0]
    assert engines[1].runner.decode.count > 5  # type: ignore[union-attr]
    assert engines[1]._runs_ahead is behind
    return engines[1]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("k", "block_size"), [(1, 16), (3, 1), (7, 4)])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_same_tokens_and_acceptance(
    target: Target, plain: list[list[int]], fixed: Fixed, kind: str, k: int, block_size: int, behind: bool
) -> None:
    """Requests of different lengths and own K, drafts right for 0 to K tokens."""
    answers = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    own = [None, None, 1, None, 0, None, k, 2]
    params = [greedy(40 - 3 * i, num_speculative_tokens=own_k) for i, own_k in enumerate(own)]
    engine = compare(fixed, target, tiny_head(target, kind), k, params, answers, behind, block_size=block_size)
    assert engine.stats.spec.num_accepted_tokens > 20


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_own_drafts(target: Target, fixed: Fixed, kind: str) -> None:
    """The random head's own drafts; a smaller draft vocabulary makes some of them right."""
    drafter = tiny_head(target, kind, draft_vocab_size=8, own_lm_head=True)
    compare(fixed, target, drafter, 4, [greedy(40)] * len(SEQUENCES), behind=True)


@pytest.mark.parametrize("behind", [False, True])
def test_without_drafts(target: Target, plain: list[list[int]], fixed: Fixed, behind: bool) -> None:
    params = [greedy(40 - 4 * i) for i in range(len(SEQUENCES))]
    engine = compare(fixed, target, None, 0, params, behind=behind, max_num_seqs=3, block_size=4)
    assert engine.stats.num_output_tokens == sum(40 - 4 * i for i in range(len(SEQUENCES)))


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("k", [0, 4])
def test_temperature(target: Target, fixed: Fixed, k: int, behind: bool) -> None:
    """Sampled and greedy requests in one batch, with and without top-k, top-p and min-p; those with a report or banned
    tokens take ragged steps."""
    params = [
        SamplingParams(max_tokens=30, temperature=0.8 * (i % 3 > 0), seed=i, ignore_eos=True)
        for i in range(len(SEQUENCES))
    ]
    drafter = tiny_head(target) if k else None
    compare(fixed, target, drafter, k, params, behind=behind)
    filters = ({"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}, {"top_k": 40, "top_p": 0.9, "min_p": 0.02}, {})
    params = [
        SamplingParams(max_tokens=30, temperature=0.9, seed=i, ignore_eos=True, **filters[i % 5])  # type: ignore[arg-type]
        for i in range(len(SEQUENCES))
    ]
    compare(fixed, target, drafter, k, params, behind=behind)
    params[0] = SamplingParams(max_tokens=4, temperature=0.8, presence_penalty=0.7, seed=0, ignore_eos=True)
    params[1] = SamplingParams(max_tokens=6, temperature=0.8, logprobs=2, seed=0, ignore_eos=True)
    params[2] = SamplingParams(max_tokens=12, temperature=0, min_tokens=6, stop_token_ids=list(range(50)))
    compare(fixed, target, drafter, k, params, behind=behind)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_float8_cache(target: Target, fixed: Fixed, kind: str) -> None:
    """Drafts change nothing about what a float8 cache gives; it is not what an exact one gives."""
    exact, coarse = (
        [r.output_token_ids for r in run(make_engine(target, kv_cache_dtype=dtype), SEQUENCES, greedy(40))]
        for dtype in ("auto", "fp8")
    )
    assert coarse != exact
    answers = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, coarse, strict=True))}
    engine = compare(fixed, target, tiny_head(target, kind), 3, [greedy(40)] * 8, answers, kv_cache_dtype="fp8")
    assert engine.runner.kv_cache[0][0].dtype is torch.float8_e4m3fn
    assert engine.runner.draft_pass is not None
    assert engine.runner.draft_pass.kv_cache[0][0].dtype is torch.float8_e4m3fn
    replay(engine, answers, by_position(3))
    assert [r.output_token_ids for r in run(engine, SEQUENCES, greedy(40))] == coarse


@pytest.mark.parametrize("behind", [False, True])
def test_ends_inside_accepted_runs(target: Target, plain: list[list[int]], fixed: Fixed, behind: bool) -> None:
    """End-of-sequence at every place of an accepted run, while others go on."""
    k = 5
    answers = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    params = [greedy(40, stop_token_ids=[answer[12 + i]]) for i, answer in enumerate(plain)]
    engine = compare(fixed, target, tiny_head(target), k, params, answers, behind, block_size=4)
    assert engine.stats.num_output_tokens < 40 * len(SEQUENCES)


def test_text_and_reports_one_step_behind(target: Target, plain: list[list[int]], fixed: Fixed) -> None:
    """Streamed text, stop strings, logprobs and prompt logprobs in small chunks: as without running ahead."""
    answers = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    assert target.tokenizer is not None
    stop = target.tokenizer.decode(plain[3][9:11])
    params = [
        greedy(30),
        greedy(25, logprobs=2),
        greedy(20, prompt_logprobs=1),
        greedy(30, stop=[stop]),
        greedy(30, stop=[stop], include_stop_str_in_output=True, stop_token_ids=[plain[4][20]]),
        greedy(30, stop_token_ids=[plain[5][14]], include_stop_str_in_output=True),
        greedy(9, presence_penalty=0.5),
        greedy(35, stop_token_ids=[plain[7][8]]),
    ]
    results = []
    for behind in (False, True):
        engine = fixed(target, tiny_head(target), 3, async_scheduling=behind, max_num_batched_tokens=24)
        replay(engine, answers, by_position(3))
        requests = [
            engine.add_request(str(i), prompt, own, stream_interval=i % 3)
            for i, (prompt, own) in enumerate(zip(SEQUENCES, params, strict=True))
        ]
        streamed: dict[str, str] = {}
        for output in drain(engine):
            streamed[output.request_id] = streamed.get(output.request_id, "") + (output.new_text or "")
        for i, request in enumerate(requests):
            assert streamed[str(i)] == (engine.text(request) if i % 3 else "")
        assert engine.blocks.num_free == engine.blocks.num_blocks
        results.append(
            [(*facts([r])[0], engine.text(r), r.logprobs, r.prompt_logprobs, r.stop_reason) for r in requests]
        )
    assert results[0] == results[1]
    assert stop not in results[0][3][3]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_preemption(target: Target, plain: list[list[int]], fixed: Fixed, kind: str, behind: bool) -> None:
    k = 5
    answers = {str(i): prompt + answer for i, (prompt, answer) in enumerate(zip(SEQUENCES, plain, strict=True))}
    engine = fixed(
        target, tiny_head(target, kind), k, async_scheduling=behind, block_size=4, num_kv_blocks=40, max_model_len=96
    )
    replay(engine, answers, by_position(k))
    requests = run(engine, SEQUENCES, greedy(40))
    assert engine.stats.num_preemptions > 0
    assert [r.output_token_ids for r in requests] == [answer[:40] for answer in plain]


@pytest.mark.parametrize("behind", [False, True])
def test_aborts_and_newcomers(target: Target, plain: list[list[int]], fixed: Fixed, behind: bool) -> None:
    """Requests leave and arrive while a step is under way; lanes and blocks are used again at once."""
    engine = fixed(target, tiny_head(target), 3, async_scheduling=behind, max_num_seqs=4, num_kv_blocks=48)
    kept = []
    for round_ in range(3):
        names = [f"{round_}-{i}" for i in range(4)]
        requests = [engine.add_request(n, SEQUENCES[i], greedy(40)) for i, n in enumerate(names)]
        for _ in range(4):
            engine.step()
        engine.abort(names[round_])
        engine.step()
        engine.abort(names[3])
        kept += [(requests[i], plain[i]) for i in range(3) if i != round_]
        if round_ == 1:
            drain(engine)
    drain(engine)
    assert engine.step() == []
    for request, answer in kept:
        assert request.output_token_ids == answer
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.requests


def test_every_request_gone_while_a_step_runs(target: Target, plain: list[list[int]], fixed: Fixed) -> None:
    engine = fixed(target, tiny_head(target), 3)
    for i in range(2):
        engine.add_request(str(i), SEQUENCES[i], greedy(40))
    for _ in range(3):
        engine.step()
    assert engine._flight is not None
    for i in range(2):
        engine.abort(str(i))
    assert not engine.has_unfinished
    assert engine.step() == []
    (request,) = run(engine, [SEQUENCES[2]], greedy(40))
    assert request.output_token_ids == plain[2]


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_at_the_models_length(target: Target, fixed: Fixed, kind: str) -> None:
    """Ends at max_model_len, where neither blocks nor the token buffer go on."""
    params = [greedy(60)] * len(SEQUENCES)
    engine = compare(fixed, target, tiny_head(target, kind), 7, params, behind=True, max_model_len=45, block_size=4)
    assert all(len(prompt) + 60 > 45 for prompt in SEQUENCES)
    assert engine.stats.num_finished == len(SEQUENCES)


def test_batches_beyond_the_limit_take_ragged_steps(target: Target, plain: list[list[int]], fixed: Fixed) -> None:
    engine = fixed(target, tiny_head(target), 3, rows=16)  # four requests of four rows
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(40)), strict=True):
        assert request.output_token_ids == answer, len(prompt)
    ragged = engine.stats.num_steps
    assert engine.runner.decode.count < 5  # type: ignore[union-attr]  # only of the last few requests
    run(engine, SEQUENCES[:4], greedy(40))
    assert engine.runner.decode.count > (engine.stats.num_steps - ragged) // 2  # type: ignore[union-attr]


def test_settings_of_graphs() -> None:
    assert EngineConfig(max_cudagraph_capture_size=0, enforce_eager=True).max_cudagraph_capture_size == 0
    with pytest.raises(InputError, match="max_cudagraph_capture_size: got -1"):
        EngineConfig(max_cudagraph_capture_size=-1)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert captured_rows(EngineConfig(max_num_seqs=16), cuda, 7) == 128
    assert captured_rows(EngineConfig(), cuda, 7) == 1024
    assert captured_rows(EngineConfig(max_cudagraph_capture_size=64), cuda, 7) == 64
    assert captured_rows(EngineConfig(enforce_eager=True), cuda, 7) == captured_rows(EngineConfig(), cpu, 7) == 0


def test_only_a_gpu_runs_ahead() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert runs_ahead(EngineConfig(), cuda)
    assert not runs_ahead(EngineConfig(async_scheduling=False), cuda)
    assert not runs_ahead(EngineConfig(), cpu)


def test_capture_sizes() -> None:
    assert capture_sizes(64, 1000) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert capture_sizes(256, 100)[-2:] == (96, 100)
    assert capture_sizes(1, 5) == (1,)
    assert capture_sizes(8, 0) == ()
