"""A request's fields as the engine's parameters; what the engine does not have is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peagle.config.engine import EngineConfig
from peagle.engine.engine import Engine
from peagle.engine.outputs import Logprob, PositionLogprobs
from peagle.engine.sampling_params import SamplingParams
from peagle.server.errors import ApiError
from peagle.server.logprobs import chat_logprobs, prompt_logprobs, text_logprobs
from peagle.server.protocol import ChatBody, CompletionBody
from peagle.server.sampling import choice_params, sampling_params
from peagle.target import load_target
from tests.server.conftest import MODEL, Running, Start


def completion(**fields: Any) -> CompletionBody:
    return CompletionBody(prompt="x", **fields)


def chat(**fields: Any) -> ChatBody:
    return ChatBody.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(("name", "harmless", "asks"), [("best_of", 1, 2), ("suffix", "", "tail")])
def test_what_is_not_served_is_refused(name: str, harmless: object, asks: object) -> None:
    assert sampling_params(completion(**{name: harmless}), 16) == SamplingParams()
    with pytest.raises(ApiError, match=f"^{name}: ") as caught:
        sampling_params(completion(**{name: asks}), 16)
    assert (caught.value.status, caught.value.param) == (400, name)


def test_what_the_engine_has_is_passed_on() -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["a"], "stop_token_ids": [4]}
    flags = {"ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True, "min_tokens": 2}
    assert sampling_params(completion(**fields, **flags), 9) == SamplingParams(9, **fields, **flags)  # type: ignore[arg-type]
    assert sampling_params(chat(), None) == SamplingParams(max_tokens=None)


def test_choices_take_the_following_seeds() -> None:
    params = SamplingParams(seed=2**63 - 1, stop="x", prompt_logprobs=2)
    assert choice_params(params, 0, stream=False) == params
    assert choice_params(params, 2, stream=False) == SamplingParams(seed=1, stop="x")
    assert choice_params(params, 2, stream=True) == SamplingParams(seed=1, stop="x", prompt_logprobs=2)
    assert choice_params(SamplingParams(), 2, stream=False) == SamplingParams()


def test_a_prompts_logprobs_are_as_many_as_are_asked_for_in_any_way() -> None:
    def asked(**fields: Any) -> int | None:
        return sampling_params(completion(**fields), 16).prompt_logprobs

    assert asked() is None
    assert asked(logprobs=3) is None
    assert asked(echo=True) is None
    assert asked(echo=True, logprobs=3) == 3
    assert asked(echo=True, logprobs=3, prompt_logprobs=5) == 5
    assert asked(echo=True, logprobs=-1, prompt_logprobs=5) == -1
    assert asked(prompt_logprobs=0) == 0


POSITIONS: list[PositionLogprobs] = [
    {5: Logprob(-2.0, 3, "é"), 1: Logprob(-0.1, 1, "b"), 2: Logprob(-0.2, 2, "c")},
    {1: Logprob(float("-inf"), 1, "b")},
]


def test_logprobs_in_both_forms() -> None:
    answer = chat_logprobs(POSITIONS, 2)["content"]
    assert answer[0] == {
        "token": "é",
        "logprob": -2.0,
        "bytes": [195, 169],
        "top_logprobs": [
            {"token": "b", "logprob": -0.1, "bytes": [98]},
            {"token": "c", "logprob": -0.2, "bytes": [99]},
        ],
    }
    assert answer[1]["logprob"] == -9999.0
    assert text_logprobs(POSITIONS, 2, 10) == {
        "tokens": ["é", "b"],
        "token_logprobs": [-2.0, -9999.0],
        "top_logprobs": [{"é": -2.0, "b": -0.1, "c": -0.2}, {"b": -9999.0}],
        "text_offset": [10, 11],
    }
    assert text_logprobs([None, *POSITIONS], 0, 0, "first") == {
        "tokens": ["first", "é", "b"],
        "token_logprobs": [None, -2.0, -9999.0],
        "top_logprobs": [None, {"é": -2.0}, {"b": -9999.0}],
        "text_offset": [0, 5, 6],
    }
    assert prompt_logprobs([None, *POSITIONS], 1) == [
        None,
        {
            "5": {"logprob": -2.0, "rank": 3, "decoded_token": "é"},
            "1": {"logprob": -0.1, "rank": 1, "decoded_token": "b"},
        },
        {"1": {"logprob": -9999.0, "rank": 1, "decoded_token": "b"}},
    ]


def test_the_bytes_of_a_part_of_a_character(start: Start, target_folder: Callable[[str], Path]) -> None:
    """Clients join them: OpenAI's `bytes` are there for tokens whose text is none."""
    loaded = load_target(str(target_folder("llama")), device="cpu")
    assert loaded.tokenizer is not None
    euro = loaded.tokenizer("€", add_special_tokens=False).input_ids
    server = start(Engine(loaded, config=EngineConfig(max_num_seqs=1, max_model_len=64, num_kv_blocks=8)))
    reported = []
    for token in euro:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True, "temperature": 0}
        answer = server.post("/v1/chat/completions", body | {"logit_bias": {str(token): 100}}).json()
        reported += answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in reported] == ["\ufffd"] * 3
    assert bytes(byte for entry in reported for byte in entry["bytes"]).decode() == "€"


def test_logprobs_of_a_chat(server: Running) -> None:
    settings: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "hi"}],
        "temperature": 0,
        "max_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    client = server.client()
    whole = client.chat.completions.create(**settings)
    reported = whole.choices[0].logprobs
    assert reported is not None
    assert reported.content is not None
    assert len(reported.content) == 12
    assert "".join(entry.token for entry in reported.content) == whole.choices[0].message.content
    for entry in reported.content:  # greedy: the chosen one is the likeliest
        assert entry.top_logprobs[0].token == entry.token
        assert len(entry.top_logprobs) == 2
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    streamed = []
    for chunk in client.chat.completions.create(**settings, stream=True):
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [entry.token for entry in streamed] == [entry.token for entry in reported.content]


def test_logprobs_and_penalties_of_a_completion(server: Running) -> None:
    client = server.client()
    settings: dict[str, Any] = {"model": MODEL, "prompt": [3, 4], "temperature": 0, "max_tokens": 20, "logprobs": 1}
    whole = client.completions.create(**settings).choices[0]
    assert whole.logprobs is not None
    assert "".join(whole.logprobs.tokens or []) == whole.text
    assert whole.logprobs.text_offset == list(range(20))
    assert all(len(top) == 1 for top in whole.logprobs.top_logprobs or [])
    streamed = [chunk.choices[0].logprobs for chunk in client.completions.create(**settings, stream=True)]
    assert [offset for part in streamed if part for offset in part.text_offset or []] == list(range(20))
    biased = client.completions.create(**settings, logit_bias={"7": 100}, extra_body={"min_p": 0.1}).choices[0]
    assert biased.text == chr(40) * 20  # token 7 of the tiny tokenizer
    once = client.completions.create(**settings, frequency_penalty=2.0, extra_body={"repetition_penalty": 5.0})
    assert once.choices[0].text != whole.text


def test_a_top_k_beyond_any_vocabulary(server: Running) -> None:
    prompt = {"prompt": [3, 4], "temperature": 1.0, "seed": 5}
    answers = [server.post("/v1/completions", prompt | {"top_k": value}) for value in (320, 2**31, 2**63 - 1)]
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1
