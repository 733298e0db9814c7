"""Histograms over requests, under vLLM's names: how long they are, what they ask for, and where their time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from peagle.engine.request import Request
from peagle.server.histogram import FastHistogram

if TYPE_CHECKING:
    from peagle.server.metrics import Family

FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
WHOLE_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
CHOICES = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 3, 5, 10, 20)


def one_two_five(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    step = 1
    while True:
        for factor in (1, 2, 5):
            if factor * step > most:
                return
            yield factor * step
        step *= 10


@dataclass(slots=True)
class Times:
    """When things happened to a request, on the monotonic clock; None before they did."""

    arrived: float = field(default_factory=time.monotonic)
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True)
class Group:
    """The n answers to one prompt."""

    n: int
    unfinished: int
    most_tokens: int = 0


class RequestMetrics:
    """Observed by the engine's thread, in this order: `scheduled`, `tokens` for each step that gave some, `ended`."""

    def __init__(self, family: Family, max_model_len: int) -> None:
        lengths = tuple(one_two_five(max_model_len))

        def seconds(name: str, text: str, buckets: tuple[float, ...] = WHOLE_REQUEST) -> FastHistogram:
            return family.histogram(f"{name}_seconds", f"Histogram of {text} in seconds.", buckets)

        self.first = seconds("time_to_first_token", "time to first token", FIRST_TOKEN)
        self.between = seconds("inter_token_latency", "inter-token latency", BETWEEN_TOKENS)
        # what vLLM called it before, for its older dashboards
        self.between_before = seconds("time_per_output_token", "time per output token", BETWEEN_TOKENS)
        self.per_token = seconds("request_time_per_output_token", "time per output token per request", BETWEEN_TOKENS)
        self.whole = seconds("e2e_request_latency", "e2e request latency")
        self.queue = seconds("request_queue_time", "time spent in WAITING phase for request")
        self.inference = seconds("request_inference_time", "time spent in RUNNING phase for request")
        self.prefill = seconds("request_prefill_time", "time spent in PREFILL phase for request")
        self.decode = seconds("request_decode_time", "time spent in DECODE phase for request")
        tokens = "Number of {} tokens processed."
        self.prompt_tokens = family.histogram("request_prompt_tokens", tokens.format("prefill"), lengths)
        self.generated = family.histogram("request_generation_tokens", tokens.format("generation"), lengths)
        self.computed = family.histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            lengths,
        )
        self.max_tokens = family.histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", lengths
        )
        self.preemptions = family.histogram(
            "request_num_preemptions", "Histogram of the number of times a request was preempted.", PREEMPTIONS
        )
        self.n = family.histogram("request_params_n", "Histogram of the n request parameter.", CHOICES)
        self.longest = family.histogram(
            "request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", lengths
        )

    def scheduled(self, times: Times, now: float) -> None:
        times.scheduled = now
        self.queue.observe(now - times.arrived)

    def tokens(self, times: Times, now: float) -> None:
        if times.last_token is None:
            times.first_token = now
            self.first.observe(now - times.arrived)
        else:
            self.between.observe(now - times.last_token)
            self.between_before.observe(now - times.last_token)
        times.last_token = now

    def ended(self, times: Times, group: Group, request: Request) -> None:
        """request: as it is now that it has finished."""
        prompt, cached = request.num_prompt, max(request.num_cached_tokens, 0)
        generated = len(request.token_ids) - prompt
        assert times.scheduled is not None
        assert times.first_token is not None
        assert times.last_token is not None
        self.whole.observe(times.last_token - times.arrived)
        self.inference.observe(times.last_token - times.scheduled)
        self.prefill.observe(times.first_token - times.scheduled)
        self.decode.observe(times.last_token - times.first_token)
        if generated > 1:
            self.per_token.observe((times.last_token - times.first_token) / (generated - 1))
        self.prompt_tokens.observe(prompt)
        self.computed.observe(prompt - cached)
        self.generated.observe(generated)
        self.preemptions.observe(request.num_preemptions)
        if request.params.max_tokens is not None:
            self.max_tokens.observe(request.params.max_tokens)
        group.unfinished -= 1
        group.most_tokens = max(group.most_tokens, generated)
        if group.unfinished == 0:
            self.n.observe(group.n)
            self.longest.observe(group.most_tokens)
