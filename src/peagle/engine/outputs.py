"""What the engine gives back: per step, and per finished request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from peagle.engine.stats import SpecMetrics

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True)
class StepOutput:
    """What one step added to one request.

    accepted_mask: True where the token came from a draft, False for the target's own. new_text: the text that may be
    sent now, only for requests added with `stream_text` (incomplete characters and possible stop strings are held
    back). stop_reason: the stop string or stop token id that ended it, None for end-of-sequence.
    """

    request_id: str
    new_token_ids: list[int]
    accepted_mask: list[bool]
    finished: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    new_text: str = ""


@dataclass(slots=True)
class CompletionOutput:
    """One completion: text and the token ids it was made of, the ending token included."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    index: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A finished request. prompt is None when it was given as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: SpecMetrics = field(default_factory=SpecMetrics)
    finished: bool = True
