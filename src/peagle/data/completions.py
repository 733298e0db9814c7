"""One answer from a server's /v1/completions: what is asked, what comes back, and its exact token ids.

Prompts go as token ids. A server that tells the answer's ids (vLLM, SGLang and this project's with `return_token_ids`)
is taken at its word; the text of any other is tokenised anew, and kept unless something says that its tokens were
others.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import httpx

from peagle.client.stream import StreamError, stream_chunks
from peagle.data.request_queue import EndpointError, LoopWatch
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError


class InexactAnswer(Exception):
    """An answer whose token ids cannot be known; the message says why."""


@dataclass(slots=True)
class Received:
    """A finished answer as the server told it; None for what it did not tell. finish_reason also "loop"."""

    text: str = ""
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerTokens:
    """What tells an answer's tokens. end_id: the token that ends an answer by the chat template, if it has one."""

    tokenizer: Any
    vocab_size: int
    end_ids: frozenset[int]
    end_id: int | None


def request_body(model: str, prompt: Sequence[int], params: SamplingParams, extensions: bool) -> dict[str, Any]:
    """The JSON of one request. extensions: vLLM's fields too, so that its server's own defaults change nothing.

    Raises InputError for parameters that need the extensions.
    """
    body: dict[str, Any] = {"model": model, "prompt": list(prompt), "max_tokens": params.max_tokens, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "temperature": params.temperature, "top_p": params.top_p}
    if params.temperature > 0 and params.seed is not None:
        body["seed"] = params.seed
    if params.stop_strings:
        body["stop"] = list(params.stop_strings)
    if extensions:
        body |= {"top_k": params.top_k or -1, "repetition_penalty": 1.0}
        body |= {"skip_special_tokens": False, "return_token_ids": True}
        if params.stop_token_ids:
            body["stop_token_ids"] = list(params.stop_token_ids)
        return body
    if params.top_k > 0:
        raise InputError(f"--top-k {params.top_k}: the endpoint refuses top_k, expected 0")
    if params.stop_token_ids:
        raise InputError(
            "user turns cannot be written through this endpoint, which refuses stop_token_ids: expected no "
            "--self-prompts, and no more --turns than the prompts have"
        )
    return body


async def receive(client: httpx.AsyncClient, url: str, body: dict[str, Any], loop_limit: int) -> Received:
    """Ask and read the stream to its end, or to where the answer loops (only where token ids are told).

    Raises StatusError, StreamError, httpx's errors, and EndpointError for another prompt than was sent.
    """
    received, done, watch = Received(), False, LoopWatch(loop_limit)
    async with aclosing(stream_chunks(client, url, body)) as chunks:
        async for _, chunk in chunks:
            if chunk is None:
                done = True
                continue
            try:
                _take(received, chunk, body["prompt"])
            except EndpointError:  # a ValueError too
                raise
            except (AttributeError, KeyError, TypeError, ValueError):
                raise StreamError(f"an event is no piece of a completion: {str(chunk)[:200]}")
            if received.token_ids is not None and received.finish_reason is None:
                loop = watch.end(received.token_ids, False)
                if loop:
                    received.token_ids, received.finish_reason = received.token_ids[:loop], "loop"
                    return received  # closing the stream makes the server drop the request
    if received.finish_reason is None:
        raise StreamError("the answer has no finish_reason" if done else "the stream ended before the answer did")
    _check_prompt(received.prompt_tokens, len(body["prompt"]))
    return received


def _take(received: Received, chunk: dict[str, Any], prompt: list[int]) -> None:
    usage = chunk.get("usage") or {}
    if usage.get("completion_tokens") is not None:
        received.completion_tokens = int(usage["completion_tokens"])
    if usage.get("prompt_tokens") is not None:
        received.prompt_tokens = int(usage["prompt_tokens"])
    for choice in chunk.get("choices") or ():
        _take_choice(received, choice, prompt)


def _take_choice(received: Received, choice: dict[str, Any], prompt: list[int]) -> None:
    received.text += choice.get("text") or ""
    if choice.get("token_ids") is not None:
        if received.token_ids is None:
            received.token_ids = []
        received.token_ids.extend(int(token) for token in choice["token_ids"])
    if choice.get("finish_reason") is not None:
        received.finish_reason = str(choice["finish_reason"])
        received.stop_reason = choice.get("stop_reason")
    told = choice.get("prompt_token_ids")
    if told is not None and list(told) != prompt:
        raise EndpointError("the endpoint read other prompt tokens than were sent; is its tokenizer the target's?")


def _check_prompt(told: int | None, sent: int) -> None:
    if told is not None and told != sent:
        raise EndpointError(
            f"the endpoint counted {told} prompt tokens where {sent} were sent; is its tokenizer the target's, and "
            "does it take token ids as they are?"
        )


def exact_tokens(
    received: Received, prompt: Sequence[int], params: SamplingParams, answer: AnswerTokens
) -> tuple[list[int], str]:
    """The answer's token ids, the end token included, and why it ended: stop, length or loop.

    Raises InexactAnswer, and EndpointError for ids outside the vocabulary.
    """
    reason = str(received.finish_reason)
    if received.token_ids is None:
        found = retokenise(answer.tokenizer, prompt, received.text)
        if found is None:
            raise InexactAnswer("the text does not come out of its own tokens again")
        ids = found
    else:
        ids = list(received.token_ids)
    if any(not 0 <= token < answer.vocab_size for token in ids):
        raise EndpointError(
            f"the endpoint answered with token id {max(ids)}, outside the target's vocabulary of {answer.vocab_size}; "
            "does it serve another model?"
        )
    ends = {*answer.end_ids, *(params.stop_token_ids or ())}
    if reason == "stop" and not params.stop_strings and (not ids or ids[-1] not in ends):
        ids.append(_end_token(received.stop_reason, params, answer))
    if reason != "loop" and not params.stop_strings:
        _check_count(len(ids), reason == "stop", received.completion_tokens)
    return ids, reason


def _end_token(stop_reason: str | int | None, params: SamplingParams, answer: AnswerTokens) -> int:
    if isinstance(stop_reason, int) and not isinstance(stop_reason, bool):
        return stop_reason
    end = next(iter(params.stop_token_ids or ()), answer.end_id)
    if end is None:
        raise InexactAnswer("the token that ended it is not told, and the chat template does not say which one does")
    return end


def _check_count(tokens: int, ended: bool, told: int | None) -> None:
    """Servers differ in whether the end token counts."""
    if told is not None and told not in ((tokens, tokens - 1) if ended else (tokens,)):
        raise InexactAnswer(f"the server counts {told} tokens, its answer comes to {tokens}")


def retokenise(tokenizer: Any, prompt: Sequence[int], text: str) -> list[int] | None:
    """Token ids of an answer's text behind its prompt, or None if they do not decode to the same text.

    It is encoded together with the prompt, for some tokenizers treat the beginning of a text differently.
    """

    def decode(ids: Collection[int]) -> str:
        return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    before = decode(prompt)
    whole = list(tokenizer.encode(before + text, add_special_tokens=False))
    prompt = list(prompt)
    if whole[: len(prompt)] == prompt:
        ids = whole[len(prompt) :]
    else:  # the answer's first characters melt into the template's last ones
        ids = list(tokenizer.encode(text, add_special_tokens=False))
    return ids if decode([*prompt, *ids]) == before + text else None
