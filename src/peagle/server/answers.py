"""OpenAI's response objects, whole and in chunks, for chat and for plain completions."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Literal

from peagle.engine.stats import SpecMetrics
from peagle.server.engine_loop import Call, PositionLogprobs, Update
from peagle.server.errors import ApiError


@dataclass(slots=True)
class Choice:
    """One choice as it grows; `index` counts over prompts and, within a prompt, over its n answers."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    metrics: SpecMetrics | None = None
    logprobs: list[PositionLogprobs] | None = None
    offset: int = 0  # where the text of the next reported token begins

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        if update.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *update.logprobs]
        if update.finished:
            self.finish_reason, self.stop_reason = update.finish_reason, update.stop_reason
            self.metrics = update.metrics


@dataclass(slots=True)
class Answer:
    """What a response says beside its choices, and which of the extras the client asked for."""

    kind: Literal["chat", "text"]
    model: str
    prompts: list[list[int]]
    n: int = 1
    include_usage: bool = False
    return_token_ids: bool = False
    return_spec_metrics: bool = False
    top_logprobs: int = 0
    stream_interval: int = 1
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"

    def usage(self, completion_tokens: int) -> dict[str, int]:
        prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def _head(self, object_name: str) -> dict[str, Any]:
        return {"id": self.id, "object": object_name, "created": self.created, "model": self.model}

    def _extras(self, choice: Choice) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.return_token_ids:
            extras["token_ids"] = choice.token_ids
        if self.return_spec_metrics and choice.metrics is not None:
            extras["spec_metrics"] = spec_metrics(choice.metrics)
        return extras

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.logprobs is None:
            return None
        if self.kind == "chat":
            return chat_logprobs(choice.logprobs, self.top_logprobs)
        report = text_logprobs(choice.logprobs, self.top_logprobs, choice.offset)
        choice.offset += sum(map(len, report["tokens"]))
        return report

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        return {"prompt_token_ids": self.prompts[index // self.n]} if self.return_token_ids else {}

    async def whole(self, call: Call) -> dict[str, Any]:
        """The response that is not streamed."""
        choices = [Choice(job.index) for job in call.jobs]
        async for update in call:
            choices[update.index].add(update)
        listed = []
        for choice in choices:
            end = {
                "logprobs": self._logprobs(choice),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            if self.kind == "chat":
                message = {"role": "assistant", "content": choice.text, "refusal": None}
                listed.append({"index": choice.index, "message": message, **end, **self._extras(choice)})
            else:
                extras = self._extras(choice) | self._prompt_ids(choice.index)
                listed.append({"index": choice.index, "text": choice.text, **end, **extras})
        usage = self.usage(sum(len(choice.token_ids) for choice in choices))
        whole = self._head("chat.completion" if self.kind == "chat" else "text_completion")
        whole |= {"choices": listed, "usage": usage, "system_fingerprint": None}
        return whole | (self._prompt_ids(0) if self.kind == "chat" else {})

    def _chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> dict[str, Any]:
        chunk = self._head("chat.completion.chunk" if self.kind == "chat" else "text_completion")
        chunk |= {"choices": choices, "system_fingerprint": None}
        # with include_usage every chunk has the key, and only the last one a value
        return chunk | ({"usage": usage} if self.include_usage else {})

    def _piece(
        self, index: int, delta: dict[str, Any] | str, reason: str | None = None, **extras: Any
    ) -> dict[str, Any]:
        content = {"delta": delta} if self.kind == "chat" else {"text": delta}
        return {"index": index, **content, "logprobs": None, "finish_reason": reason} | extras

    async def chunks(self, call: Call) -> AsyncIterator[dict[str, Any]]:
        """The streamed response's chunks: for chat a role chunk a choice first, then text as it comes (stream_interval
        tokens at a time), each choice's end, and the usage if it was asked for."""
        chat = self.kind == "chat"
        pending = [Choice(job.index) for job in call.jobs]
        begun = [False] * len(pending)
        completion_tokens = 0
        if chat:
            for choice in pending:
                chunk = self._chunk([self._piece(choice.index, {"role": "assistant", "content": ""})])
                yield chunk | (self._prompt_ids(0) if choice.index == 0 else {})
        async for update in call:
            choice = pending[update.index]
            choice.add(update)
            completion_tokens += len(update.token_ids)
            waits = begun[choice.index] and len(choice.token_ids) < self.stream_interval
            if not update.finished and (waits or not choice.text):
                continue
            extras = self._extras(choice) | {"logprobs": self._logprobs(choice)}
            if not chat and not begun[choice.index]:
                extras |= self._prompt_ids(choice.index)
            begun[choice.index] = True
            end: dict[str, Any] = {}
            if update.finished:
                end = {"reason": choice.finish_reason, "stop_reason": choice.stop_reason}
            if not chat:
                yield self._chunk([self._piece(choice.index, choice.text, **end, **extras)])
            else:
                metrics = {"spec_metrics": extras.pop("spec_metrics")} if "spec_metrics" in extras else {}
                if choice.text or extras.get("token_ids") or extras["logprobs"]:
                    yield self._chunk([self._piece(choice.index, {"content": choice.text}, **extras)])
                if update.finished:
                    yield self._chunk([self._piece(choice.index, {}, **end, **metrics)])
            pending[choice.index] = Choice(choice.index, offset=choice.offset)
        if self.include_usage:
            yield self._chunk([], self.usage(completion_tokens))

    async def events(self, call: Call) -> AsyncIterator[bytes]:
        """`chunks` as server-sent events, an engine failure as an event of its own, and [DONE]."""
        try:
            async for chunk in self.chunks(call):
                yield event(chunk)
        except ApiError as error:
            yield event(error.body)
        yield b"data: [DONE]\n\n"


def _shown(token_id: int, entry: Any) -> str:
    return f"token_id:{token_id}" if entry.decoded_token is None else entry.decoded_token


def _likeliest(position: PositionLogprobs, count: int) -> list[tuple[int, Any]]:
    return sorted((pair for pair in position.items() if pair[1].rank <= count), key=lambda pair: pair[1].rank)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity; vLLM's floor


def chat_logprobs(positions: list[PositionLogprobs], count: int) -> dict[str, Any]:
    """A chat choice's logprobs: every token with its `count` likeliest alternatives."""

    def entry(token_id: int, found: Any) -> dict[str, Any]:
        token = _shown(token_id, found)
        return {"token": token, "logprob": _finite(found.logprob), "bytes": list(token.encode("utf-8", "replace"))}

    content = [
        entry(*next(iter(position.items()))) | {"top_logprobs": [entry(*pair) for pair in _likeliest(position, count)]}
        for position in positions
    ]
    return {"content": content, "refusal": None}


def text_logprobs(positions: list[PositionLogprobs], count: int, offset: int) -> dict[str, Any]:
    """A plain completion's logprobs; `offset` is where in the choice's text the first token begins."""
    report: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for position in positions:
        token_id, found = next(iter(position.items()))
        token = _shown(token_id, found)
        report["tokens"].append(token)
        report["token_logprobs"].append(_finite(found.logprob))
        shown = [(token_id, found), *_likeliest(position, count)]
        report["top_logprobs"].append({_shown(*pair): _finite(pair[1].logprob) for pair in shown})
        report["text_offset"].append(offset)
        offset += len(token)
    return report


def event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def spec_metrics(metrics: SpecMetrics) -> dict[str, Any]:
    """A choice's drafts and what became of them."""
    return {
        "num_drafts": metrics.num_drafts,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "num_accepted_tokens_per_pos": list(metrics.accepted_per_pos),
        "acceptance_length": metrics.acceptance_length,
    }
