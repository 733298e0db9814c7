"""One request: its tokens, how far they are computed, and when it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from peagle.engine.detokenizer import Detokenizer
from peagle.engine.outputs import FinishReason, PositionLogprobs
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import SpecMetrics


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    """State of one request.

    token_ids: prompt and output. num_computed: how many of them the target has cached. While decoding it is
    len(token_ids) - 1 and num_drafts drafts stand behind the last token; the drafts themselves live with the runner.
    drafter_computed: how many positions the drafter has cached, where it may stay behind (see draft_planner).
    max_total_tokens: prompt and output together never exceed it. num_speculative_tokens: the request's own K.
    stop_ids: the tokens that end it (end-of-sequence unless ignored, and stop_token_ids). num_logprobs,
    num_prompt_logprobs: how many of the likeliest tokens to report, -1 for no report. logprobs, prompt_logprobs: the
    reports so far, None when not asked for. block_keys: of its full blocks, the first num_keyed_blocks of which are
    entered in the prefix cache; num_cached_tokens: how many came from there when it first ran, -1 before that.
    unshown: output tokens that the detokenizer has yet to be given. stream_interval: how many tokens are turned into
    text at a time (0: none is told in steps); num_untold: those since the last time; has_shown: there was text already.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_total_tokens: int
    num_speculative_tokens: int
    eos_token_ids: frozenset[int]
    seed: int
    detokenizer: Detokenizer | None = None
    stream_interval: int = 0
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    token_ids: list[int] = field(init=False)
    stop_ids: frozenset[int] = field(init=False)
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_drafts: int = 0
    drafter_computed: int = 0
    lane: int = -1
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_keyed_blocks: int = 0
    num_cached_tokens: int = -1
    num_preemptions: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    metrics: SpecMetrics = field(default_factory=SpecMetrics)
    logprobs: list[PositionLogprobs] | None = None
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    unshown: list[int] = field(default_factory=list)
    num_untold: int = 0
    has_shown: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)
        self.num_prompt = len(self.token_ids)
        eos: frozenset[int] = frozenset() if self.params.ignore_eos else self.eos_token_ids
        self.stop_ids = eos | frozenset(self.params.stop_token_ids or ())
        self.logprobs = [] if self.num_logprobs >= 0 else None
        self.prompt_logprobs = [None] if self.num_prompt_logprobs >= 0 else None

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    @property
    def waits_for_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt

    def append(self, new: list[int]) -> int:
        """Append tokens up to and including the one that ends the request; returns how many were kept.

        The earliest boundary wins. When several fall on one token: end-of-sequence or stop token, then stop string,
        then length.
        """
        params, tokens = self.params, self.token_ids
        each = self.detokenizer if params.stop_strings else None  # else `show` will do
        kept = 0
        for token in new:
            tokens.append(token)
            kept += 1
            may_stop = len(tokens) - self.num_prompt > params.min_tokens
            if may_stop and token in self.stop_ids:
                self.finish("stop", token if token in (params.stop_token_ids or ()) else None)
                if each is not None and params.include_stop_str_in_output:
                    each.push([token], may_stop=False)
                break
            if each is not None and (stop := each.push([token], may_stop)) is not None:
                self.finish("stop", stop)
                break
            if len(tokens) >= self.max_total_tokens:
                self.finish("length")
                break
        if each is None and self.detokenizer is not None:
            ended_by_token = self.finish_reason == "stop" and not params.include_stop_str_in_output
            self.unshown += new[: kept - 1 if ended_by_token else kept]
        return kept

    def show(self) -> None:
        """Turn the tokens that are no text yet into text, all at once: only stop strings need to know which token
        brings what, and they have been looked for in `append`."""
        if self.unshown and self.detokenizer is not None:
            self.detokenizer.push(self.unshown, may_stop=False)
            self.unshown = []

    def is_due(self, new: int) -> bool:
        """Count new tokens; whether their text is to be told now. It stays due until there is some (`told`)."""
        self.num_untold += new
        return not self.has_shown or self.num_untold >= self.stream_interval or self.status is Status.FINISHED

    def told(self) -> None:
        """Text has been told."""
        self.has_shown, self.num_untold = True, 0

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.status = Status.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def text_token_ids(self) -> list[int]:
        """The output tokens that the text is made of: a token that ended the request is not part of it."""
        output = self.output_token_ids
        ended_by_token = self.finish_reason == "stop" and not isinstance(self.stop_reason, str)
        return output[:-1] if ended_by_token and not self.params.include_stop_str_in_output else output
