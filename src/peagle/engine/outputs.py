"""What the engine gives back: per step, and per finished request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from peagle.engine.stats import SpecMetrics

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """One token of a reported distribution. rank 1 is the likeliest; decoded_token is None without a tokenizer.

    partial_bytes: of a token that is no whole characters, so that its text cannot say what it is; else None.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    partial_bytes: bytes | None = None


# token id -> Logprob, the chosen token first, then the likeliest in order
PositionLogprobs = dict[int, Logprob]


@dataclass(slots=True)
class StepOutput:
    """What one step added to one request.

    accepted_mask: True where the token came from a draft, False for the target's own. new_text: the text that may be
    sent now, incomplete characters and possible stop strings held back; None where it is not told yet, or never (no
    `stream_interval`). stop_reason: the stop string or stop token id that ended it, None for end-of-sequence.
    new_logprobs: one entry a new token, for requests that ask for logprobs. error: why the request could not be run,
    with finish_reason "error".
    """

    request_id: str
    new_token_ids: list[int]
    accepted_mask: list[bool]
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    new_text: str | None = None
    new_logprobs: list[PositionLogprobs] | None = None
    error: Exception | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One completion: text and the token ids it was made of, the ending token included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    index: int = 0
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request with its n completions; metrics are over all of them. prompt is None when it was given as
    token ids. prompt_logprobs: one entry a prompt token, None for the first. num_cached_tokens: prompt
    tokens that came from the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SpecMetrics = field(default_factory=SpecMetrics)
    finished: bool = True
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
