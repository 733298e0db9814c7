"""Text and messages to token ids, off the event loop and with a tokenizer that nobody else touches."""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from peagle.engine.chat import content_of, template_takes_parts
from peagle.server.errors import ApiError, bad_request
from peagle.server.protocol import ChatBody, CompletionBody, DetokenizeBody, Message, TokenizeBody

T = TypeVar("T")


def num_prompts(body: ChatBody | CompletionBody) -> int:
    """How many prompts a request has."""
    prompt = [] if isinstance(body, ChatBody) else body.prompt
    return len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1


class Prompts:
    """Encodes and decodes for one server. Raises ApiError naming the field."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int) -> None:
        """tokenizer: the engine's, or None (token ids only); it is copied, for the engine's thread decodes with it."""
        self.tokenizer = copy.deepcopy(tokenizer)
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._reserved: frozenset[str] = frozenset()
        self._longest_token = 1
        if tokenizer is not None:
            self._longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
            self._reserved = frozenset(inspect.signature(self.tokenizer.apply_chat_template).parameters)
        self._takes_parts = template_takes_parts(self.tokenizer)

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def completion(self, body: CompletionBody) -> list[list[int]]:
        """The prompts of a plain completion."""
        prompt = body.prompt
        special = body.add_special_tokens is not False
        prompts: Sequence[Any] = prompt if isinstance(prompt, list) else [prompt]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            prompts = [prompt]
        if not prompts:
            raise bad_request("prompt", "prompt: got an empty list, expected at least one prompt")
        return [await self._ids(p, special) if isinstance(p, str) else self._check_ids(p, "prompt") for p in prompts]

    async def echoed(self, body: CompletionBody, prompts: list[list[int]]) -> tuple[list[str], list[str]]:
        """Each prompt as text, as it was given if it was a text, and its first token as text."""
        if self.tokenizer is None:
            raise bad_request("echo", "echo: the model has no tokenizer")
        given = [body.prompt] if isinstance(body.prompt, str) else body.prompt

        def texts() -> tuple[list[str], list[str]]:
            decode = self.tokenizer.decode
            whole = [
                text if isinstance(text, str) else str(decode(ids))
                for text, ids in zip(given if isinstance(given[0], str) else prompts, prompts, strict=True)
            ]
            return whole, [str(decode(ids[:1])) for ids in prompts]

        return await self._run(texts)

    async def chat(self, body: ChatBody | TokenizeBody) -> list[int]:
        """The prompt that the chat template makes of the messages."""
        if self.tokenizer is None or not self.tokenizer.chat_template:
            raise bad_request("messages", "messages: the model has no chat template; use /v1/completions")
        kwargs = dict(body.chat_template_kwargs or {})
        if taken := sorted(self._reserved & kwargs.keys()):
            raise bad_request("chat_template_kwargs", f"chat_template_kwargs: {taken[0]!r} cannot be set by a request")
        messages = [_plain(message, self._takes_parts) for message in body.messages or ()]
        generate = body.add_generation_prompt is not False

        def render() -> str:
            return str(
                self.tokenizer.apply_chat_template(messages, add_generation_prompt=generate, tokenize=False, **kwargs)
            )

        try:
            text = await self._run(render)
        except Exception as error:  # templates raise whatever they like, for roles they do not know for example
            raise bad_request("messages", f"messages: the chat template refuses them ({error})") from error
        # the template writes the special tokens itself
        return await self._ids(text, body.add_special_tokens is True, "messages")

    async def _ids(self, text: str, special: bool, field: str = "prompt") -> list[int]:
        if self.tokenizer is None:
            raise bad_request(field, f"{field}: the model has no tokenizer, expected token ids")
        # what cannot fit, whatever its tokens are, would only keep the others waiting for theirs
        if len(text) > (most := self.max_model_len * self._longest_token):
            raise bad_request(
                field,
                f"{field}: got {len(text)} characters, expected at most {most}: the maximum context length is "
                f"{self.max_model_len} tokens",
                "context_length_exceeded",
            )
        try:
            return list(await self._run(lambda: self.tokenizer(text, add_special_tokens=special).input_ids))
        except (UnicodeError, TypeError) as error:  # lone surrogates
            raise bad_request(field, f"{field}: is no valid Unicode text ({type(error).__name__})") from error

    def _check_ids(self, ids: list[int], field: str) -> list[int]:
        for token in ids:
            if token >= self.vocab_size:
                raise bad_request(field, f"{field}: got token id {token}, expected 0 to {self.vocab_size - 1}")
        return ids

    def check_length(self, ids: Sequence[int], max_tokens: int | None, field: str, max_tokens_field: str) -> None:
        """Refuse a prompt that leaves no room for its answer within the model's length."""
        if not ids:
            raise bad_request(field, f"{field}: got no tokens, expected at least one")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise bad_request(
                field,
                f"{field}: got {len(ids)} tokens, expected at most {self.max_model_len - 1}: the maximum context "
                f"length is {self.max_model_len} tokens, the answer included",
                "context_length_exceeded",
            )
        if max_tokens is not None and max_tokens > room:
            raise bad_request(
                max_tokens_field,
                f"{max_tokens_field}: got {max_tokens}, expected at most {room}: the maximum context length is "
                f"{self.max_model_len} tokens and the prompt has {len(ids)}",
                "context_length_exceeded",
            )

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """vLLM's answer to /tokenize."""
        if (body.prompt is None) == (body.messages is None):
            raise bad_request("prompt", "prompt: expected exactly one of prompt and messages")
        if body.prompt is not None:
            for name in ("add_generation_prompt", "chat_template_kwargs"):
                if getattr(body, name) is not None:
                    raise bad_request(name, f"{name}: only allowed with messages, which the chat template renders")
            ids = await self._ids(body.prompt, body.add_special_tokens is not False)
        else:
            ids = await self.chat(body)
        strings = None
        if body.return_token_strs:
            strings = await self._run(lambda: self.tokenizer.convert_ids_to_tokens(ids))
        return {"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len, "token_strs": strings}

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """vLLM's answer to /detokenize."""
        if self.tokenizer is None:
            raise bad_request("tokens", "tokens: the model has no tokenizer")
        ids = self._check_ids(body.tokens, "tokens")
        return {"prompt": await self._run(lambda: self.tokenizer.decode(ids))}


def _plain(message: Message, takes_parts: bool) -> dict[str, Any]:
    if message.content is None and message.role != "assistant":
        raise ApiError(400, f"messages: a {message.role} message has no content", param="messages")
    given = message.content
    content = content_of([part.text for part in given], takes_parts) if isinstance(given, list) else given or ""
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": content, **named}
