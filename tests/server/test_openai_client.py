"""The official OpenAI client, unchanged, against the server."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from peagle.engine.chat import template_takes_parts
from peagle.engine.sampling_params import SamplingParams
from peagle.server.prompts import Prompts
from peagle.server.protocol import ChatBody
from tests.server.conftest import MODEL, Running

Alone = Callable[[list[int], SamplingParams], tuple[str, list[int], str]]
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a hash?"}]


def ids(server: Running, text: str) -> list[int]:
    tokenizer = server.engine.target.tokenizer
    assert tokenizer is not None
    return list(tokenizer(text, add_special_tokens=False).input_ids)


CHAT_TEXT = "<system>Be brief.<|end|><user>What is a hash?<|end|><assistant>"


def test_chat(server: Running, alone: Alone) -> None:
    answer = server.client().chat.completions.create(model=MODEL, messages=MESSAGES, temperature=0, max_tokens=20)  # type: ignore[arg-type]
    prompt = ids(server, CHAT_TEXT)
    text, tokens, reason = alone(prompt, SamplingParams(max_tokens=20, temperature=0))
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(tokens))
    assert answer.usage.total_tokens == len(prompt) + len(tokens)
    assert answer.model == MODEL


def test_chat_takes_its_own_answer_back(server: Running) -> None:
    client = server.client()
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=5)  # type: ignore[arg-type]
    history = [
        *MESSAGES,
        first.choices[0].message.model_dump() | {"tool_calls": [], "reasoning": None},  # as vLLM gives it back
        {"role": "user", "content": [{"type": "text", "text": "?"}]},
    ]
    assert client.chat.completions.create(model=MODEL, messages=history, max_tokens=5).choices  # type: ignore[arg-type]


def test_a_message_in_parts_is_what_vllm_makes_of_it(server: Running) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": "a hash?"}]
    asked = {"messages": [{"role": "user", "content": parts}]}
    tokens = server.post("/tokenize", asked).json()["tokens"]
    assert tokens == ids(server, "<user>What is\na hash?<|end|><assistant>")


def test_a_template_that_takes_parts_gets_them(server: Running) -> None:
    tokenizer = copy.deepcopy(server.engine.target.tokenizer)
    assert tokenizer is not None
    body = ChatBody.model_validate(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("a ", " b")]}]}
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}>{% endfor %}"
    )
    prompts = Prompts(tokenizer, server.engine.target.vocab_size, 64)
    assert asyncio.run(prompts.chat(body)) == ids(server, "<ab>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ raise_exception('no') if m.content is not string }}{% endfor %}"
    )
    assert not template_takes_parts(tokenizer)


def test_chat_stream_with_usage(server: Running) -> None:
    client = server.client()
    settings = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_completion_tokens": 30, "n": 2}
    whole = client.chat.completions.create(**settings)  # type: ignore[call-overload]
    stream = client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
    chunks = list(stream)
    assert all(chunk.object == "chat.completion.chunk" and chunk.id == chunks[0].id for chunk in chunks)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for index in (0, 1):
        pieces = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert pieces[0].delta.role == "assistant"
        assert pieces[0].delta.content == ""
        assert pieces[-1].delta.content is None
        assert pieces[-1].finish_reason == whole.choices[index].finish_reason
        assert all(piece.finish_reason is None for piece in pieces[:-1])
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[index].message.content


@pytest.mark.parametrize("chat", [False, True])
def test_usage_all_along(server: Running, chat: bool) -> None:
    """As load generators ask for it: every chunk has its choice's usage so far, and the last that of all."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    settings = {"max_tokens": 12, "n": 2, "stream": True, "stream_options": options, "ignore_eos": True}
    body = {"messages": MESSAGES} if chat else {"prompt": [[1, 2, 3], [4]]}
    answer = server.post("/v1/chat/completions" if chat else "/v1/completions", body | settings)
    chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    last: dict[int, dict[str, int]] = {}
    for chunk in chunks[:-1]:
        index, usage = chunk["choices"][0]["index"], chunk["usage"]
        assert usage["completion_tokens"] >= last.get(index, {"completion_tokens": 0})["completion_tokens"]
        last[index] = usage
    prompts = [len(ids(server, CHAT_TEXT))] if chat else [3, 1]
    for index, usage in last.items():
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompts[index // 2], 12)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["prompt_tokens"] == sum(prompts)
    assert chunks[-1]["usage"]["completion_tokens"] == 12 * len(last) == 24 * len(prompts)


def test_what_asks_for_nothing_is_accepted(server: Running) -> None:
    nothing = {"tools": [], "tool_choice": "none", "parallel_tool_calls": True, "store": False, "metadata": {"a": "b"}}
    nothing |= {"functions": [], "function_call": "none", "modalities": ["text"], "max_completion_tokens": 3}
    nulls = ("reasoning_effort", "audio", "prediction", "web_search_options", "verbosity", "response_format", "stop")
    body = {"messages": MESSAGES, "max_tokens": 3, **nothing, **dict.fromkeys(nulls)}
    assert server.post("/v1/chat/completions", body).status_code == 200
    body |= {"max_completion_tokens": 4}
    assert "max_tokens" in server.post("/v1/chat/completions", body).json()["error"]["message"]
    client = server.client()
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=3,
        service_tier="auto",
        **nothing,  # type: ignore[arg-type]
    )
    assert answer.usage is not None
    for asks in ({"store": True}, {"tool_choice": "required"}, {"service_tier": "flex"}, {"reasoning_effort": "low"}):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model=MODEL, messages=MESSAGES, **asks)  # type: ignore[call-overload]
        assert caught.value.param == next(iter(asks))


@pytest.mark.parametrize("as_ids", [False, True])
def test_completions_of_several_prompts(server: Running, alone: Alone, as_ids: bool) -> None:
    texts = ["one", "two words", "x"]
    prompts = [ids(server, text) for text in texts]
    sent = prompts if as_ids else texts
    answer = server.client().completions.create(model=MODEL, prompt=sent, temperature=0, max_tokens=12)  # type: ignore[arg-type]
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        assert choice.text == alone(prompt, SamplingParams(max_tokens=12, temperature=0))[0]
        assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 36


def test_one_prompt_of_ids_and_the_default_length(server: Running, alone: Alone) -> None:
    answer = server.client().completions.create(model=MODEL, prompt=[1, 2, 3], temperature=0)
    assert answer.choices[0].text == alone([1, 2, 3], SamplingParams(temperature=0))[0]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_n_takes_the_following_seeds(server: Running, alone: Alone) -> None:
    settings = {"model": MODEL, "prompt": [[5, 6], [7]], "n": 3, "seed": 11, "temperature": 0.9, "max_tokens": 15}
    answer = server.client().completions.create(**settings)  # type: ignore[call-overload]
    expected = [
        alone(prompt, SamplingParams(max_tokens=15, temperature=0.9, seed=11 + i))[0]
        for prompt in ([5, 6], [7])
        for i in range(3)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert len(set(expected)) > 1


def test_completion_stream(server: Running) -> None:
    client = server.client()
    settings = {"model": MODEL, "prompt": ["ab", "cd"], "temperature": 0, "max_tokens": 25}
    whole = client.completions.create(**settings)  # type: ignore[call-overload]
    texts = ["", ""]
    reasons = [None, None]
    for chunk in client.completions.create(**settings, stream=True):  # type: ignore[call-overload]
        texts[chunk.choices[0].index] += chunk.choices[0].text
        reasons[chunk.choices[0].index] = chunk.choices[0].finish_reason
        assert chunk.usage is None
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == ["length", "length"]


def test_token_ids_and_acceptance_on_demand(server: Running, alone: Alone) -> None:
    extra = {"return_token_ids": True, "return_spec_metrics": True, "ignore_eos": True, "top_k": -1}
    settings = {"model": MODEL, "prompt": [4, 5], "temperature": 0, "max_tokens": 20}
    client = server.client()
    choice = client.completions.create(**settings, extra_body=extra).choices[0].model_dump()  # type: ignore[call-overload]
    expected = alone([4, 5], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True))
    assert (choice["text"], choice["token_ids"]) == expected[:2]
    assert choice["prompt_token_ids"] == [4, 5]
    spec = choice["spec_metrics"]
    assert spec["num_drafts"] > 0
    assert spec["acceptance_length"] == 1 + spec["num_accepted_tokens"] / spec["num_drafts"]
    assert sum(spec["num_accepted_tokens_per_pos"]) == spec["num_accepted_tokens"]
    chunks = [c.choices[0].model_dump() for c in client.completions.create(**settings, extra_body=extra, stream=True)]  # type: ignore[call-overload]
    assert [token for chunk in chunks for token in chunk["token_ids"]] == choice["token_ids"]
    assert chunks[0]["prompt_token_ids"] == [4, 5]
    assert chunks[-1]["spec_metrics"] == spec
    plain = client.completions.create(**settings, extra_body=extra | {"num_speculative_tokens": 0})  # type: ignore[call-overload]
    assert plain.choices[0].text == choice["text"]
    assert plain.choices[0].model_dump()["spec_metrics"]["num_drafts"] == 0


def test_stop_string_equals_the_engines(server: Running, alone: Alone) -> None:
    text = alone([9, 8, 7], SamplingParams(max_tokens=40, temperature=0))[0]
    stop = text[10:13]
    expected = alone([9, 8, 7], SamplingParams(max_tokens=40, temperature=0, stop=stop))
    client = server.client()
    settings = {"model": MODEL, "prompt": [9, 8, 7], "temperature": 0, "max_tokens": 40, "stop": [stop]}
    choice = client.completions.create(**settings).choices[0]  # type: ignore[call-overload]
    assert (choice.text, choice.finish_reason) == (expected[0], "stop")
    assert choice.model_dump()["stop_reason"] == stop
    streamed = "".join(c.choices[0].text for c in client.completions.create(**settings, stream=True))  # type: ignore[call-overload]
    assert streamed == expected[0]


def test_models(server: Running) -> None:
    client = server.client()
    assert [model.id for model in client.models.list()] == [MODEL, "alias"]
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature"),
        ({"top_p": 1.5}, openai.BadRequestError, "top_p"),
        ({"max_tokens": 0}, openai.BadRequestError, "max_tokens"),
        ({"max_tokens": 250}, openai.BadRequestError, "max_tokens"),
        ({"n": 0}, openai.BadRequestError, "n"),
        ({"stop": [""]}, openai.BadRequestError, "stop"),
        ({"stop": "x" * 1001}, openai.BadRequestError, "stop"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, openai.BadRequestError, "logit_bias"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 300}]}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, openai.BadRequestError, "messages"),
        ({"messages": [{"role": "user"}]}, openai.BadRequestError, "messages"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"stream_options": {"include_usage": True}}, openai.BadRequestError, "stream_options"),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense"),
        ({"extra_body": {"min_tokens": 50}, "max_tokens": 5}, openai.BadRequestError, "min_tokens"),
        ({"extra_body": {"stop_token_ids": [100000]}}, openai.BadRequestError, "stop_token_ids"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, openai.BadRequestError, "chat_template_kwargs"),
        ({"max_completion_tokens": 5, "max_tokens": 6}, openai.BadRequestError, "max_tokens"),
    ],
)
def test_errors_name_the_field(
    server: Running, change: dict[str, object], error: type[openai.APIStatusError], param: str
) -> None:
    settings = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **change}
    with pytest.raises(error) as caught:
        server.client().chat.completions.create(**settings)  # type: ignore[call-overload]
    assert caught.value.param == param
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}
    assert param in caught.value.body["message"]


def test_the_error_of_a_long_prompt_names_both_lengths(server: Running) -> None:
    with pytest.raises(openai.BadRequestError, match=r"256 tokens.*255.*256") as caught:
        server.client().completions.create(model=MODEL, prompt=[1] * 256)
    assert caught.value.code == "context_length_exceeded"
    # at the limit there is room for one token
    answer = server.client().completions.create(model=MODEL, prompt=[1] * 255)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


@pytest.mark.parametrize(
    ("prompt", "answered"),
    [([], 0), ("", 0), ([[]], 0), ([5], 16), ([5] * 255, 1), ([5] * 256, 0), ([5] * 240, 16), ([5] * 241, 15)],
    ids=lambda value: str(len(value)) if isinstance(value, list | str) else str(value),
)
def test_prompts_at_the_limits(server: Running, prompt: Any, answered: int) -> None:
    """Of 256 tokens, prompt and answer; the default of 16 tokens gives way."""
    answer = server.post("/v1/completions", {"prompt": prompt, "ignore_eos": True})
    if answered:
        assert answer.json()["usage"]["completion_tokens"] == answered
    else:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}', b"[" * 10000])
def test_bodies_that_are_no_request(server: Running, body: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": 5}, "prompt: got 5, expected a text, a list of token ids"),
        ({"prompt": [[1], "a"]}, "prompt: got [[1], 'a'], expected a text"),
        (
            {"stop": ["a"] * 65},
            "stop: got ['a', 'a', 'a', 'a', 'a', 'a', ...], expected a string or a list of at most 64",
        ),
        ({"top_p": 0}, "top_p: got 0, expected greater than 0"),
        ({"logit_bias": {"stop": None}}, "logit_bias.stop: got None, expected a valid number"),
    ],
)
def test_errors_say_what_was_sent_and_what_was_expected(server: Running, change: Any, message: str) -> None:
    error = server.post("/v1/completions", {"prompt": "x"} | change).json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == next(iter(change))


def test_the_error_of_a_part_that_is_no_text(server: Running) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    error = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": [image]}]}).json()["error"]
    assert error["message"].startswith("messages.0.content: got [")
    assert "reads nothing but text" in error["message"]
    assert error["param"] == "messages"


def test_json_without_its_header_is_told(server: Running) -> None:
    """What curl sends with -d and no -H."""
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


def test_text_that_is_no_unicode(server: Running) -> None:
    for field in ("prompt", "model", "\ud800"):
        body = json.dumps({"prompt": "x"} | {field: "\ud800"})  # escaped, as JSON may
        headers = {"Content-Type": "application/json"}
        assert httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).status_code in (400, 404)


def test_api_key(start: Callable[..., Running]) -> None:
    server = start(api_keys=("secret", "other", "of two words"))
    assert server.client(api_key="of two words").models.list().data
    with pytest.raises(openai.AuthenticationError):
        server.client(api_key="of").models.list()
    for key in ("secret", "other"):
        assert server.client(api_key=key).models.list().data
    with pytest.raises(openai.AuthenticationError) as caught:
        server.client(api_key="wrong").completions.create(model=MODEL, prompt="x")
    assert caught.value.code == "invalid_api_key"
    assert httpx.get(f"{server.url}/v1/models").status_code == 401
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_web_pages_ask_only_where_they_may(start: Callable[..., Running], server: Running) -> None:
    origin = {"Origin": "http://page.example"}
    question = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    allowed = "access-control-allow-origin"
    open_to_one = start(api_keys=("secret",), allowed_origins=("http://page.example",))
    url = f"{open_to_one.url}/v1/chat/completions"
    assert httpx.options(url, headers=question).headers[allowed] == "http://page.example"
    refused = httpx.post(url, json={}, headers=origin)  # the page is told what was wrong, too
    assert (refused.status_code, refused.headers[allowed]) == (401, "http://page.example")
    assert allowed not in httpx.options(url, headers=question | {"Origin": "http://other.example"}).headers
    assert allowed not in server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=origin).headers


def test_tokenize_and_back(server: Running) -> None:
    answer = server.post("/tokenize", {"model": MODEL, "prompt": "héllo", "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == 6
    assert answer["max_model_len"] == 256
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": "héllo"}
    chat = server.post("/tokenize", {"messages": MESSAGES}).json()
    assert server.post("/detokenize", {"tokens": chat["tokens"]}).json()["prompt"] == CHAT_TEXT
    assert server.post("/tokenize", {}).status_code == 400
    assert server.post("/detokenize", {"tokens": [10**6]}).status_code == 400


def test_the_server_is_as_it_was(server: Running) -> None:
    server.settle()
