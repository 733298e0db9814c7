"""A request's fields as SamplingParams; whatever the engine does not do is refused, never dropped."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from peagle.engine.sampling_params import MAX_SEED, SamplingParams
from peagle.errors import InputError
from peagle.server.errors import ApiError, bad_request
from peagle.server.protocol import ChatBody, CompletionBody

# Asked for by name only: the engine gets them when SamplingParams has a field of that name. The value is what a client
# may send in any case, because it asks for nothing.
SAMPLING: dict[str, Any] = {
    "temperature": None,
    "top_p": 1.0,
    "top_k": None,
    "min_p": 0.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": [],
    "ignore_eos": False,
    "min_tokens": 0,
    "skip_special_tokens": True,
    "include_stop_str_in_output": False,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "num_speculative_tokens": None,
}
# The server itself has no form for these in its answers.
NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
ENGINE_FIELDS = frozenset(field.name for field in fields(SamplingParams))


def refuse_unserved(body: ChatBody | CompletionBody) -> None:
    """Raise ApiError for a field that asks for something that this server does not do."""
    for name, harmless in NOT_SERVED.items():
        value = getattr(body, name, None)
        if value is not None and not any(value == known and type(value) is type(known) for known in harmless):
            raise bad_request(name, f"{name}: got {value!r}, but this server does not support it", "unsupported")
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "stream_options: only allowed with stream: true")


def sampling_params(body: ChatBody | CompletionBody, max_tokens: int | None) -> SamplingParams:
    """The engine's parameters. Raises ApiError naming the field."""
    refuse_unserved(body)
    values: dict[str, Any] = {"max_tokens": max_tokens}
    for name, harmless in SAMPLING.items():
        value = getattr(body, name)
        if value is None:
            continue
        if name in ENGINE_FIELDS:
            values[name] = _logit_bias(value) if name == "logit_bias" else value
        elif value != harmless:
            raise bad_request(name, f"{name}: got {value!r}, but this engine does not support it", "unsupported")
    if (logprobs := wanted_logprobs(body)) is not None:
        if "logprobs" not in ENGINE_FIELDS:
            raise bad_request("logprobs", f"logprobs: got {body.logprobs}, but this engine does not support it")
        values["logprobs"] = logprobs
    try:
        return SamplingParams(**values)
    except InputError as error:
        raise from_input_error(error, body) from error


def wanted_logprobs(body: ChatBody | CompletionBody) -> int | None:
    """How many alternatives a token the client wants beside the token itself; None for no logprobs at all."""
    if isinstance(body, CompletionBody):
        return body.logprobs
    if not body.logprobs:
        if body.top_logprobs:
            raise bad_request(
                "top_logprobs", f"top_logprobs: got {body.top_logprobs}, only allowed with logprobs: true"
            )
        return None
    return body.top_logprobs or 0


def _logit_bias(value: dict[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise bad_request("logit_bias", f"logit_bias: got keys {list(value)[:3]}, expected token ids") from None


def from_input_error(error: InputError, body: ChatBody | CompletionBody) -> ApiError:
    """400 with the field that the engine's message begins with."""
    message = str(error)
    name = message.partition(":")[0]
    if name == "max_tokens" and getattr(body, "max_completion_tokens", None) is not None:
        name = "max_completion_tokens"
    if name == "prompt" and isinstance(body, ChatBody):
        name = "messages"
    return bad_request(name if name in type(body).model_fields else None, message)


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of the choice-th answer to one prompt: its seed is the request's plus its number, as in vLLM."""
    if params.seed is None or choice == 0:
        return params
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return SamplingParams(**values | {"seed": (params.seed + choice) % (MAX_SEED + 1)})
