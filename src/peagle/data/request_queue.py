"""Requests kept queued in an engine, so that it is never short of work while long answers finish."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError

Tag = TypeVar("Tag")
CHECK_EVERY = 32  # tokens between two looks at whether an answer loops
NOT_ANSWERED = ("refused", "unanswered")  # finish reasons that only a server's answers have


class EngineLike(Protocol):
    """The part of `peagle.engine.engine.Engine` used here."""

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Any: ...

    def step(self) -> Sequence[Any]: ...

    def abort(self, request_id: str) -> Any: ...


class EndpointError(InputError):
    """A server is down, or is not one that can answer for the target; a run ends with what it has."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a server gave no answer. status: the HTTP status, None if the answer's tokens could not be told."""

    status: int | None
    message: str

    def __str__(self) -> str:
        return self.message if self.status is None else f"{self.status}: {self.message}"


class LoopWatch:
    """Where a growing answer begins to loop, looked at after every CHECK_EVERY tokens, however many come at a time.

    A limit of 0 never finds a loop.
    """

    def __init__(self, limit: int):
        self._limit = limit
        self._seen = 0

    def end(self, tokens: Sequence[int], finished: bool) -> int:
        """How many of `tokens`, the answer so far, there were at the first look that finds a loop; 0 if none does.

        A finished answer's last token is not looked at, for there it has ended anyway.
        """
        last = len(tokens) - finished
        looks = range((self._seen // CHECK_EVERY + 1) * CHECK_EVERY, last + 1, CHECK_EVERY) if self._limit else ()
        self._seen = last
        return next((at for at in looks if is_looping(tokens[max(at - self._limit, 0) : at], self._limit)), 0)


@dataclass(frozen=True, slots=True)
class Completion(Generic[Tag]):
    """A finished request: what it was submitted with, its tokens (the end token included) and why it ended.

    An engine that asks a server may also end one as "refused" or "unanswered"; `refusal` then says what it was told.
    """

    tag: Tag
    token_ids: list[int]
    finish_reason: str
    refusal: Refusal | None = None

    @property
    def answered(self) -> bool:
        return self.finish_reason not in NOT_ANSWERED


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
        self._watches: dict[str, LoopWatch] = {}
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
        self._watches[request_id] = LoopWatch(self._loop_limit)

    def step(self) -> list[Completion[Tag]]:
        """Run one engine step; what finished in it."""
        done: list[Completion[Tag]] = []
        for output in self._engine.step():
            if output.request_id not in self._tags:  # an aborted one may still report what was under way
                continue
            self.generated += len(output.new_token_ids)
            tokens = self._tokens[output.request_id]
            tokens.extend(int(token) for token in output.new_token_ids)
            loop = self._watches[output.request_id].end(tokens, output.finished)
            if loop and not output.finished:
                self._engine.abort(output.request_id)
            if output.finished or loop:
                del self._tokens[output.request_id], self._watches[output.request_id]
                reason = "loop" if loop else str(output.finish_reason)
                refusal = getattr(output, "refusal", None)  # the engine in the process refuses none
                done.append(Completion(self._tags.pop(output.request_id), tokens[: loop or None], reason, refusal))
        return done

    def abort_all(self) -> None:
        """Drop every unfinished request."""
        for request_id in list(self._tags):
            self._engine.abort(request_id)
        self._tags.clear()
        self._tokens.clear()
        self._watches.clear()


def is_looping(tokens: Sequence[int], limit: int) -> bool:
    """Whether the last `limit` tokens repeat one run of at most half as many."""
    if len(tokens) < limit:
        return False
    tail = list(tokens[-limit:])
    return any(tail[period:] == tail[:-period] for period in range(1, limit // 2 + 1))
