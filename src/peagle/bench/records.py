"""What a load run leaves behind: one record a request, whatever became of it, and the run around them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from peagle.engine.stats import SpecMetrics

# Why a request failed:
#   http        the server answered with a status other than 200
#   connection  no connection, or it broke
#   stall       nothing came for longer than the stall time-out
#   timeout     the whole request took longer than it may
#   stream      the stream said an error, ended early, or was not what the API promises
#   engine      the engine in this process raised an error
#   not_sent    earlier requests failed one after another, so this one was not tried
Failure = Literal["http", "connection", "stall", "timeout", "stream", "engine", "not_sent"]


@dataclass(slots=True)
class Record:
    """One request. Times are seconds; `start` counts from the run's start.

    ttft: start to the first token that shows. latency: start to the last token; of a server's answer to its end, which
    the last token may have come with. itls: gaps between the arrivals of tokens, several of which may come together.
    token_ids: the answer's, where the engine tells them. failure None means success; `error` then is empty, otherwise
    what the server or the client said. A failed request keeps what it had received.
    """

    conversation: int
    turn: int
    start: float
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft: float = 0.0
    latency: float = 0.0
    itls: list[float] = field(default_factory=list)
    token_ids: list[int] | None = None
    text: str = ""
    finish_reason: str | None = None
    failure: Failure | None = None
    error: str = ""
    prompt_ids: Sequence[int] | None = None  # where prompts are token ids; not written to results

    @property
    def tpot(self) -> float | None:
        """Time per output token: (latency - TTFT) / (tokens - 1); None for answers of one token."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


@dataclass(slots=True)
class Run:
    """All requests of one arm. duration: first request sent to last answer complete, seconds.

    num_skipped: later turns that were not asked, because their conversation had grown beyond the model's length or had
    failed before. spec: what became of drafts, None where the engine does not tell. cache_queries and cache_hits:
    prompt tokens looked up and found in a prefix cache, None where not told. notes: what a reader has to know of it.
    """

    records: list[Record]
    duration: float
    num_skipped: int = 0
    spec: SpecMetrics | None = None
    cache_queries: int | None = None
    cache_hits: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def succeeded(self) -> list[Record]:
        return [record for record in self.records if record.failure is None]

    @property
    def failures(self) -> dict[str, int]:
        """How many requests failed, by kind."""
        return dict(Counter(record.failure for record in self.records if record.failure is not None))

    def sort(self) -> None:
        """Into the workload's order, in which runs are compared."""
        self.records.sort(key=lambda record: (record.conversation, record.turn))
