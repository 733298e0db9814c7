"""OpenAI's response objects, whole and in chunks, for chat and for plain completions."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.engine.outputs import PositionLogprobs
from peagle.engine.stats import SpecMetrics
from peagle.server.calls import Call, Update
from peagle.server.errors import ApiError
from peagle.server.json_parts import SLICE, encode, encode_utf8, event, joined, slices, spliced
from peagle.server.logprobs import chat_logprobs, prompt_logprobs, text_logprobs

log = logging.getLogger(__name__)
MAX_REPORTED = 2**19  # tokens with their logprobs in one response
UNKNOWN_LENGTH = 4096  # what an answer without max_tokens counts as, of that: few are longer, and none need be refused


@dataclass(frozen=True)
class Echo:
    """Prompts that stand before their answers in a plain completion's text.

    texts, first_tokens: each prompt, and its first token alone, as text. only: the answers themselves are left out.
    """

    texts: list[str]
    first_tokens: list[str]
    only: bool = False


@dataclass(slots=True)
class Choice:
    """One choice as it grows; `index` counts over prompts and, within a prompt, over its n answers."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: SpecMetrics | None = None
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    offset: int = 0  # where the text of the next reported token begins

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        self.logprobs += update.logprobs or ()
        if update.prompt_logprobs is not None:
            self.prompt_logprobs = update.prompt_logprobs
        if update.finished:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
            self.metrics = update.metrics


@dataclass(slots=True)
class Answer:
    """What a response says beside its choices, and which of the extras the client asked for.

    top_logprobs, prompt_logprobs: how many of the likeliest tokens to list (-1: all that are reported), None for none
    of it.
    """

    kind: Literal["chat", "text"]
    model: str
    prompts: list[list[int]]
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    return_spec_metrics: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: Echo | None = None
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    # made once a prompt, for all its answers
    _prompt_reports: dict[int, bytes] = field(default_factory=dict, init=False)
    _echo_reports: dict[int, tuple[dict[str, list[str]], int]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"

    def usage(self, completion_tokens: int, index: int | None = None) -> dict[str, int]:
        """Of the whole answer, or of the index-th choice so far."""
        prompts = self.prompts if index is None else [self.prompts[index // self.n]]
        prompt_tokens = sum(map(len, prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _head(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    def _begin(self, call: Call) -> list[Choice]:
        """The choices before their first tokens."""
        texts = [] if self.echo is None else self.echo.texts
        return [Choice(job.index, texts[job.index // self.n] if texts else "") for job in call.jobs]

    async def _updates(self, call: Call) -> AsyncIterator[Update]:
        async for update in call:
            if self.echo is not None and self.echo.only:  # the step that computed the prompt chose a token, too
                update = Update(update.index, "", [], "length", prompt_logprobs=update.prompt_logprobs)
            yield update

    def _extras(self, choice: Choice) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.return_token_ids:
            extras["token_ids"] = choice.token_ids
        # nobody may take text that comes of synthetic acceptance for the model's
        if choice.metrics is not None and (self.return_spec_metrics or choice.metrics.synthetic):
            extras["spec_metrics"] = spec_metrics(choice.metrics)
        return extras

    def reported(self, max_tokens: int | None, max_logprobs: int) -> tuple[int, int]:
        """How many tokens with their logprobs stand in the response at most, of prompts and of answers, if no request
        gets more than max_logprobs a position. max_tokens: of each answer, None if it ends by itself."""
        # a chat has its prompt's report once, a plain completion in every choice
        prompt_tokens = sum(map(len, self.prompts)) * (1 if self.kind == "chat" else self.n)
        of_prompts = 0
        for asked in (self.prompt_logprobs, self.top_logprobs if self.echo is not None else None):
            if asked is not None:
                of_prompts = max(of_prompts, prompt_tokens * (min(asked, max_logprobs) + 1))
        if self.top_logprobs is None or (self.echo is not None and self.echo.only):
            return of_prompts, 0
        tokens = UNKNOWN_LENGTH if max_tokens is None else max_tokens
        return of_prompts, tokens * len(self.prompts) * self.n * (min(self.top_logprobs, max_logprobs) + 1)

    async def _logprobs(self, choice: Choice) -> dict[str, Any] | bytes | None:
        """A choice's report, as JSON where it is long."""
        if self.top_logprobs is None:
            return None
        few = choice.prompt_logprobs is None and sum(map(len, choice.logprobs)) <= SLICE  # as in a stream's chunk
        if self.kind == "chat":
            if few:
                return chat_logprobs(choice.logprobs, self.top_logprobs)
            shown = self.top_logprobs
            parts = [encode(chat_logprobs(part, shown)["content"]) async for part in slices(choice.logprobs)]
            return spliced({"content": joined(parts), "refusal": None})
        if few:
            return text_report(choice, choice.logprobs, self.top_logprobs)
        lists = empty_text_report()
        if self.echo is not None and choice.prompt_logprobs is not None:
            lists = await self._echoed(choice)
        async for positions in slices(choice.logprobs):
            add(lists, text_report(choice, positions, self.top_logprobs))
        return spliced({name: joined(parts) for name, parts in lists.items()})

    async def _echoed(self, choice: Choice) -> dict[str, list[str]]:
        """The prompt's part of a plain completion's report, of which all answers to the prompt have the same."""
        assert self.echo is not None
        assert self.top_logprobs is not None
        number = choice.index // self.n
        if number not in self._echo_reports:
            lists = empty_text_report()
            first = self.echo.first_tokens[number]
            async for positions in slices(choice.prompt_logprobs or ()):
                add(lists, text_report(choice, positions, self.top_logprobs, first))
            self._echo_reports[number] = lists, choice.offset
        lists, choice.offset = self._echo_reports[number]
        return {name: [*parts] for name, parts in lists.items()}

    async def _prompt(self, choice: Choice) -> dict[str, Any]:
        """What is said of a choice's prompt beside its text."""
        said: dict[str, Any] = {}
        number = choice.index // self.n
        if self.return_token_ids:
            said["prompt_token_ids"] = self.prompts[number]
        if self.prompt_logprobs is not None and choice.prompt_logprobs is not None:
            if number not in self._prompt_reports:
                reports = slices(choice.prompt_logprobs)
                parts = [encode(prompt_logprobs(part, self.prompt_logprobs)) async for part in reports]
                self._prompt_reports[number] = joined(parts)
            said["prompt_logprobs"] = self._prompt_reports[number]
        return said

    async def whole(self, call: Call) -> bytes:
        """The response that is not streamed, as JSON."""
        choices = self._begin(call)
        async for update in self._updates(call):
            choices[update.index].add(update)
        listed = []
        for choice in choices:
            # only the first of a prompt's answers has it reported
            choice.prompt_logprobs = choices[choice.index - choice.index % self.n].prompt_logprobs
            end = {
                "logprobs": await self._logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self.kind == "chat":
                message = {"role": "assistant", "content": choice.text, "refusal": None}
                said = {"index": choice.index, "message": message, **end, **self._extras(choice)}
            else:
                extras = self._extras(choice) | await self._prompt(choice)
                said = {"index": choice.index, "text": choice.text, **end, **extras}
            listed.append(spliced(said, encode_utf8))
            await asyncio.sleep(0)
        whole = self._head("chat.completion" if self.kind == "chat" else "text_completion")
        whole["choices"] = b"[%s]" % b",".join(listed)
        whole["usage"] = self.usage(sum(len(choice.token_ids) for choice in choices))
        whole["system_fingerprint"] = None
        return spliced(whole | (await self._prompt(choices[0]) if self.kind == "chat" else {}), encode_utf8)

    def _chunk(self, piece: dict[str, Any] | None, tokens: int) -> dict[str, Any]:
        """A chunk with a piece of one choice, of which so many tokens have come; the usage of them all without one."""
        chunk = self._head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        choices: list[Any] | bytes = [] if piece is None else [piece]
        if piece is not None and bytes in map(type, piece.values()):
            choices = b"[%s]" % spliced(piece)
        chunk |= {"choices": choices, "system_fingerprint": None}
        if not self.include_usage:
            return chunk
        # every chunk has the key; but for the last it has no value, unless the client wants it all along
        known = piece is None or self.continuous_usage
        return chunk | {"usage": self.usage(tokens, None if piece is None else piece["index"]) if known else None}

    def _piece(
        self, index: int, delta: dict[str, Any] | str, reason: str | None = None, **extras: Any
    ) -> dict[str, Any]:
        content = {"delta": delta} if self.kind == "chat" else {"text": delta}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason} | extras

    async def chunks(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The streamed response's chunks: for chat a role chunk when a choice's first token is there (clients time it
        by that chunk), then text as it comes, each choice's end, and the usage if it was asked for. Bytes in them are
        JSON."""
        chat = self.kind == "chat"
        pending = self._begin(call)
        begun = [False] * len(pending)
        tokens = [0] * len(pending)
        async for update in self._updates(call):
            index = update.index
            choice = pending[index]
            if chat and not begun[index]:
                chunk = self._chunk(self._piece(index, {"role": "assistant", "content": ""}), 0)
                yield chunk | (await self._prompt(choice) if index == 0 else {})
                begun[index] = True
            choice.add(update)
            tokens[index] += len(update.token_ids)
            if not update.finished and not choice.text:
                continue
            extras = self._extras(choice) | {"logprobs": await self._logprobs(choice)}
            if not chat and not begun[index]:
                extras |= await self._prompt(choice)
            begun[index] = True
            end: dict[str, Any] = {}
            if update.finished:
                end = {"reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            if not chat:
                yield self._chunk(self._piece(index, choice.text, **end, **extras), tokens[index])
            else:
                metrics = {"spec_metrics": extras.pop("spec_metrics")} if "spec_metrics" in extras else {}
                if choice.text or extras.get("token_ids") or extras["logprobs"]:
                    yield self._chunk(self._piece(index, {"content": choice.text}, **extras), tokens[index])
                if update.finished:
                    yield self._chunk(self._piece(index, {}, **end, **metrics), tokens[index])
            pending[index] = Choice(index, offset=choice.offset)
        if self.include_usage:
            yield self._chunk(None, sum(tokens))

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        """`chunks` as server-sent events, a failure as an event of its own, and [DONE]."""
        try:
            async for chunk in self.chunks(call):
                yield event(chunk)
        except ApiError as error:
            yield event(error.body)
        except Exception as error:  # the status has been sent, so that no handler further out could tell the client
            log.exception("a streamed answer broke off")
            yield event(ApiError(500, f"unexpected {type(error).__name__}", type="server_error").body)
        yield b"data: [DONE]\n\n"


def text_report(
    choice: Choice, positions: Sequence[PositionLogprobs | None], count: int, first: str | None = None
) -> dict[str, list[Any]]:
    """A plain completion's logprobs of the choice's next positions."""
    report = text_logprobs(positions, count, choice.offset, first)
    choice.offset += sum(map(len, report["tokens"]))
    return report


def empty_text_report() -> dict[str, list[str]]:
    """The lists of such a report, for pieces of their JSON."""
    return text_logprobs((), 0, 0)


def add(lists: dict[str, list[str]], report: dict[str, list[Any]]) -> None:
    for name, values in report.items():
        lists[name].append(encode(values))


def spec_metrics(metrics: SpecMetrics) -> dict[str, Any]:
    """A choice's drafts and what became of them."""
    found = {
        "num_drafts": metrics.num_drafts,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(metrics.accepted_per_pos),
        "acceptance_length": metrics.acceptance_length,
    }
    return found | ({"synthetic": "BENCHMARK ONLY: drafts were accepted by chance"} if metrics.synthetic else {})
