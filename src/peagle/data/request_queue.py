"""Requests kept queued in an engine, so that it is never short of work while long answers finish."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from peagle.engine.sampling_params import SamplingParams

Tag = TypeVar("Tag")
CHECK_EVERY = 32  # tokens between two looks at whether an answer loops


class EngineLike(Protocol):
    """The part of `peagle.engine.engine.Engine` used here."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Any: ...

    def step(self) -> Sequence[Any]: ...

    def abort(self, request_id: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class Completion(Generic[Tag]):
    """A finished request: what it was submitted with, its tokens (the end token included) and why it ended."""

    tag: Tag
    token_ids: list[int]
    finish_reason: str


class RequestQueue(Generic[Tag]):
    """At most `window` unfinished requests in the engine; more than a batch, so that a free place fills at once.

    A request whose last `loop_limit` tokens go round in a circle is ended there, with the finish reason "loop": a small
    model decoding greedily would otherwise fill its whole length with them. 0 never ends one.
    """

    def __init__(self, engine: EngineLike, window: int, loop_limit: int = 0):
        self._engine = engine
        self._window = window
        self._loop_limit = loop_limit
        self._tags: dict[str, Tag] = {}
        self._tokens: dict[str, list[int]] = {}
        self._count = 0
        self.generated = 0

    @property
    def has_room(self) -> bool:
        return len(self._tags) < self._window

    def __len__(self) -> int:
        return len(self._tags)

    def submit(self, tag: Tag, prompt_token_ids: list[int], params: SamplingParams) -> None:
        """Queue one request; `tag` comes back with its tokens."""
        request_id = f"data-{self._count}"
        self._count += 1
        self._engine.add_request(request_id, prompt_token_ids, params)
        self._tags[request_id] = tag
        self._tokens[request_id] = []

    def step(self) -> list[Completion[Tag]]:
        """Run one engine step; what finished in it."""
        done: list[Completion[Tag]] = []
        for output in self._engine.step():
            if output.request_id not in self._tags:  # an aborted one may still report what was under way
                continue
            self.generated += len(output.new_token_ids)
            tokens = self._tokens[output.request_id]
            before = len(tokens)
            tokens.extend(int(token) for token in output.new_token_ids)
            looping = not output.finished and self._loops(tokens, before)
            if looping:
                self._engine.abort(output.request_id)
            if output.finished or looping:
                del self._tokens[output.request_id]
                reason = "loop" if looping else str(output.finish_reason)
                done.append(Completion(self._tags.pop(output.request_id), tokens, reason))
        return done

    def _loops(self, tokens: list[int], before: int) -> bool:
        due = self._loop_limit and len(tokens) // CHECK_EVERY > before // CHECK_EVERY
        return bool(due) and is_looping(tokens, self._loop_limit)

    def abort_all(self) -> None:
        """Drop every unfinished request."""
        for request_id in list(self._tags):
            self._engine.abort(request_id)
        self._tags.clear()
        self._tokens.clear()


def is_looping(tokens: Sequence[int], limit: int) -> bool:
    """Whether the last `limit` tokens repeat one run of at most half as many."""
    if len(tokens) < limit:
        return False
    tail = list(tokens[-limit:])
    return any(tail[period:] == tail[:-period] for period in range(1, limit // 2 + 1))
