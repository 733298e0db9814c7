"""Adding and aborting requests, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.engine import Engine, SamplingParams
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, assert_same, drain, greedy, make_engine, run, tiny_head


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_abort_in_every_state(target: Target, plain: list[list[int]], kind: str) -> None:
    engine = make_engine(target, tiny_head(target, kind), 3, max_num_seqs=3, max_num_batched_tokens=16)
    requests = [engine.add_request(str(i), SEQUENCES[i], greedy(20)) for i in (4, 6, 0, 1, 5)]
    assert engine.abort("5")  # waiting
    engine.step()
    assert requests[0].num_computed < 17
    assert engine.abort("4")  # in its prompt
    engine.step()
    engine.step()
    assert engine.abort("6")
    while len(requests[2].output_token_ids) < 3:
        engine.step()
    assert engine.abort("0")  # decoding
    assert not engine.abort("0")
    assert not engine.abort("unheard of")
    outputs = drain(engine)
    assert {output.request_id for output in outputs} == {"1"}
    assert_same(target, SEQUENCES[1], plain[1][:20], requests[3].output_token_ids)
    assert [r.finish_reason for r in requests] == ["abort", "abort", "abort", "length", "abort"]
    assert engine.blocks.num_free == engine.blocks.num_blocks
    assert not engine.requests


def test_an_idle_engine_steps(target: Target) -> None:
    engine = make_engine(target)
    assert not engine.has_unfinished
    assert engine.step() == []


def test_requests_may_join_at_any_time(target: Target, plain: list[list[int]]) -> None:
    engine = make_engine(target, tiny_head(target), 3)
    requests = []
    for i, prompt in enumerate(SEQUENCES):
        requests.append(engine.add_request(str(i), prompt, greedy(12)))
        engine.step()
    drain(engine)
    for prompt, answer, request in zip(SEQUENCES, plain, requests, strict=True):
        assert_same(target, prompt, answer[:12], request.output_token_ids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt: got no tokens"),
        ([1] * 64, "prompt: got 64 tokens, expected at most 63"),
        ([1, 320], "prompt: got token id 320, expected 0 to 319"),
        ([-1], "prompt: got token id -1"),
    ],
)
def test_bad_prompts(target: Target, prompt: list[int], message: str) -> None:
    engine = make_engine(target, max_model_len=64)
    with pytest.raises(InputError, match=message):
        engine.add_request("0", prompt)
    assert not engine.has_unfinished
    assert engine.stats.num_prompt_tokens == 0


def test_bad_requests(target: Target) -> None:
    engine = make_engine(target)
    engine.add_request("0", [1], greedy(2))
    with pytest.raises(InputError, match="request_id: '0' is in use"):
        engine.add_request("0", [1], greedy(2))
    with pytest.raises(InputError, match="stop_token_ids: got 999"):
        engine.add_request("1", [1], greedy(2, stop_token_ids=[999]))
    without = Target(target.model, None, "ids only")
    with pytest.raises(InputError, match="stop: the model has no tokenizer"):
        make_engine(without).add_request("0", [1], greedy(2, stop="x"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("stop", [""]),
        ("stop", [3]),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("seed", -1),
        ("seed", 2**63),
        ("min_tokens", -1),
        ("min_tokens", 17),
        ("num_speculative_tokens", -1),
    ],
)
def test_bad_sampling_params(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{field}: got .*expected"):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs: got 0"),
        ({"block_size": True}, "block_size: got True"),
        ({"num_kv_blocks": 0}, "num_kv_blocks: got 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: got 1.5"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization: got '0.9'"),
        ({"cpu_kv_cache_gib": 0}, "cpu_kv_cache_gib: got 0"),
        ({"max_model_len": 100_000}, "max_model_len: got 100000, expected at most the model's 512"),
        (
            {"num_kv_blocks": 3, "max_model_len": 64},
            r"one request of 64 tokens does not fit the KV cache, which holds 48; raise num_kv_blocks \(3",
        ),
        ({"cpu_kv_cache_gib": 1e-5, "max_model_len": 64}, r"raise cpu_kv_cache_gib"),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 20},
            "max_num_batched_tokens: got 20, expected at least max_model_len",
        ),
    ],
)
def test_bad_settings(target: Target, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Engine(target, config=EngineConfig(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cpu_kv_cache_gib": 4}, "^cpu_kv_cache_gib: got 4, which takes .* 0.0 GiB are available; lower it"),
        ({"num_kv_blocks": 40_000}, "^num_kv_blocks: got 40000, which takes"),
    ],
)
def test_a_cache_that_the_host_cannot_hold(
    target: Target, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str
) -> None:
    """PyTorch would reserve it, and the process would be killed when it is written to."""
    monkeypatch.setattr("peagle.engine.memory.host_memory", lambda: 2**20)
    with pytest.raises(InputError, match=message):
        Engine(target, config=EngineConfig(**settings))


@pytest.mark.parametrize(
    "extreme", [{"temperature": 1e308}, {"repetition_penalty": 1e308}, {"repetition_penalty": 1e-308}]
)
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_numbers_beyond_float32(target: Target, extreme: dict[str, float]) -> None:
    """They are sampled with like any large ones: what must not come does not."""
    banned = list(range(1, target.vocab_size))
    params = SamplingParams(max_tokens=4, min_tokens=4, stop_token_ids=banned, seed=1, **extreme)  # type: ignore[arg-type]
    (request,) = run(Engine(target, config=EngineConfig(num_kv_blocks=8, max_num_seqs=2)), [SEQUENCES[0]], params)
    assert request.output_token_ids == [0, 0, 0, 0]  # the only token that does not end it


def test_the_length_is_lowered_to_what_the_cache_holds(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        engine = Engine(target, config=EngineConfig(num_kv_blocks=4, max_num_seqs=2))
    assert engine.max_model_len == 64
    assert "max_model_len is lowered from 512 to that" in caplog.text
    (request,) = run(engine, [SEQUENCES[6]], greedy(100))
    assert len(request.token_ids) == 64


def test_depths(target: Target, caplog: pytest.LogCaptureFixture) -> None:
    for k in (0, -1):
        with pytest.raises(InputError, match=f"num_speculative_tokens: got {k}"):
            make_engine(target, tiny_head(target), k)
    with pytest.raises(InputError, match="num_speculative_tokens: got 3 without a drafter"):
        make_engine(target, None, 3)
    with caplog.at_level(logging.WARNING):
        make_engine(target, tiny_head(target), 8)
        make_engine(target, tiny_head(target, "eagle3", k_train=3), 3)
        make_engine(target, tiny_head(target, "eagle3", k_train=None), 8)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        make_engine(target, tiny_head(target), 9)
        make_engine(target, tiny_head(target, "eagle3", k_train=3), 4)
    assert "more than the 8 that the head was trained for" in caplog.text
    assert "num_speculative_tokens 4 is more than the 3 that the head was trained for" in caplog.text
    with caplog.at_level(logging.WARNING):
        make_engine(target, tiny_head(target, max_position_embeddings=100), 2)
    assert "made for 100 positions and the engine serves 128" in caplog.text


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "speculative_config: .*expected a JSON object"),
        ([], "speculative_config: got"),
        ({"model": "m"}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 3}, "model is missing"),
        ({"model": "m", "num_speculative_tokens": 0}, "num_speculative_tokens: got 0"),
        ({"model": "m", "num_speculative_tokens": 3, "method": "ngram"}, "method: got 'ngram'"),
        ({"model": "m", "num_speculative_tokens": 3, "depth": 1}, "unknown key 'depth'"),
        ({"model": "m", "num_speculative_tokens": 3, "parallel_drafting": "yes"}, "parallel_drafting: got 'yes'"),
    ],
)
def test_bad_speculative_config(value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpeculativeConfig.parse(value)


def test_speculative_config_of_the_blog() -> None:
    text = '{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 7, "parallel_drafting": true}'
    config = SpeculativeConfig.parse(text)
    assert (config.model, config.num_speculative_tokens, config.kind) == ("HEAD", 7, "p-eagle")
    assert SpeculativeConfig.parse({"model": "h", "num_speculative_tokens": 1}).kind is None
    assert SpeculativeConfig("h", 1, parallel_drafting=False).kind == "eagle3"
