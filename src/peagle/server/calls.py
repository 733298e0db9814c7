"""One HTTP request's way through the engine: a call has a job for each of its choices, and updates come back."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peagle.engine.outputs import FinishReason, PositionLogprobs
from peagle.engine.request import Request
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import SpecMetrics
from peagle.server.errors import ApiError
from peagle.server.request_metrics import Group, Times

if TYPE_CHECKING:
    from peagle.server.engine_loop import EngineLoop


@dataclass(slots=True)
class Update:
    """What one step or several added to the index-th choice of a call."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    metrics: SpecMetrics | None = None  # of the whole choice, with finish_reason
    logprobs: list[PositionLogprobs] | None = None  # one a token, for requests that ask for them
    prompt_logprobs: list[PositionLogprobs | None] | None = None  # the same, with the choice's first tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True, eq=False)
class Job:
    """One engine request: the index-th choice of a call."""

    request_id: str
    index: int
    prompt_token_ids: list[int]
    params: SamplingParams
    call: Call
    group: Group
    times: Times = field(default_factory=Times)
    stream_interval: int = 1
    request: Request | None = None
    held: Update | None = None  # what steps added since the last update that was handed out


class Call:
    """One HTTP request's choices while they run. Iterate over it for updates; `close` it in any case."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        prompts: Sequence[tuple[list[int], SamplingParams]],
        n: int,
        stream_interval: int,
    ) -> None:
        """n: so many of the prompts in a row are one, which is answered n times. stream_interval: an update comes with
        the first tokens, then for so many at a time; 0: with the last alone."""
        name = uuid.uuid4().hex
        groups = [Group(n, n) for _ in range(len(prompts) // n)]
        self.jobs = [
            Job(f"{name}-{i}", i, ids, params, self, groups[i // n], stream_interval=stream_interval)
            for i, (ids, params) in enumerate(prompts)
        ]
        self.updates: asyncio.Queue[Update | ApiError] = asyncio.Queue()
        self._engine_loop = engine_loop

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Updates until every choice has finished. Raises ApiError when the engine fails."""
        running = len(self.jobs)
        while running:
            update = await self.updates.get()
            if isinstance(update, ApiError):
                raise update
            running -= update.finished
            yield update

    def close(self) -> None:
        """Abort what still runs."""
        self._engine_loop.abort(self.jobs)
