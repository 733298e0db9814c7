"""A request's fields as SamplingParams; whatever the server does not do is refused, never dropped."""

from __future__ import annotations

import reprlib
from dataclasses import replace
from typing import Any

from peagle.engine.sampling_params import MAX_SEED, SamplingParams
from peagle.errors import InputError
from peagle.server.errors import ApiError, bad_request
from peagle.server.protocol import ChatBody, CompletionBody

# fields of both bodies that SamplingParams has under the same name and with the same meaning
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("skip_special_tokens", "include_stop_str_in_output", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "num_speculative_tokens"),
)
MAX_DIGITS = 19  # of a token id
# what is not done at all, with the value that a client may send in any case, because it asks for nothing
NOT_SERVED: dict[str, Any] = {"suffix": "", "best_of": 1}


def refuse_unserved(body: ChatBody | CompletionBody) -> None:
    """Raise ApiError for a field that asks for something that this server does not do."""
    for name, harmless in NOT_SERVED.items():
        value = getattr(body, name, None)
        if value is not None and (value != harmless or type(value) is not type(harmless)):
            raise bad_request(
                name, f"{name}: got {reprlib.repr(value)}, but this server does not support it", "unsupported"
            )
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options: only allowed with stream: true")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs", f"prompt_logprobs: got {body.prompt_logprobs}, not available in a stream")
    if isinstance(body, CompletionBody) and body.max_tokens == 0 and not body.echo:
        raise bad_request("max_tokens", "max_tokens: got 0, expected at least 1, or echo: true for the prompt alone")


def sampling_params(body: ChatBody | CompletionBody, max_tokens: int | None) -> SamplingParams:
    """The engine's parameters. Raises ApiError naming the field."""
    refuse_unserved(body)
    # an echo without an answer still takes a step, which chooses a token that nobody sees
    values: dict[str, Any] = {"max_tokens": 1 if max_tokens == 0 else max_tokens}
    values |= {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        values["logit_bias"] = _logit_bias(body.logit_bias)
    values["logprobs"] = wanted_logprobs(body)
    values["prompt_logprobs"] = _most(body.prompt_logprobs, echoed_logprobs(body))
    try:
        return SamplingParams(**values)
    except InputError as error:
        raise from_input_error(error, body) from error


def wanted_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """How many alternatives a token the client wants beside the token itself (-1: all); None for no logprobs at all."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not body.logprobs:
        if body.top_logprobs:
            raise bad_request(
                "top_logprobs", f"top_logprobs: got {body.top_logprobs}, only allowed with logprobs: true"
            )
        return None
    return body.top_logprobs or 0


def echoed_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """The same for a prompt that stands in the answer; None when none does, or without logprobs."""
    return body.logprobs if isinstance(body, CompletionBody) and body.echo else None


def _most(*counts: int | None) -> int | None:
    given = [count for count in counts if count is not None]
    return None if not given else -1 if -1 in given else max(given)


def _logit_bias(value: dict[str, float]) -> dict[int, float]:
    found: dict[int, float] = {}
    for key, bias in value.items():
        # int() takes "1_0", " 1" and other scripts' digits, too
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_DIGITS):
            raise bad_request("logit_bias", f"logit_bias: got the key {reprlib.repr(key)}, expected a token id")
        if int(key) in found:
            raise bad_request("logit_bias", f"logit_bias: got token id {int(key)} twice, expected each once")
        found[int(key)] = bias
    return found


def from_input_error(error: InputError, body: ChatBody | CompletionBody) -> ApiError:
    """400 with the field that the engine's message begins with, under the name that it has in the body."""
    name, colon, rest = str(error).partition(":")
    if isinstance(body, ChatBody):
        name = {"prompt": "messages", "logprobs": "top_logprobs"}.get(name, name)
        if name == "max_tokens" and body.max_completion_tokens is not None:
            name = "max_completion_tokens"
    return bad_request(name if name in type(body).model_fields else None, f"{name}{colon}{rest}")


def choice_params(params: SamplingParams, choice: int, stream: bool) -> SamplingParams:
    """The parameters of the choice-th answer to one prompt: its seed is the request's plus its number, as in vLLM.

    The prompt's logprobs are those of the first answer; in a stream, which waits for no other, each has its own.
    """
    if choice == 0:
        return params
    return replace(
        params,
        seed=None if params.seed is None else (params.seed + choice) % (MAX_SEED + 1),
        prompt_logprobs=params.prompt_logprobs if stream else None,
    )
