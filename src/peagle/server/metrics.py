"""What a Prometheus scrape sees, under vLLM's names and labels, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from peagle.engine.engine import Engine

# vLLM's buckets
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
FINISH_REASONS = ("stop", "length", "abort", "error")


class ServerMetrics:
    """One server's counters, gauges and histograms, in a registry of their own.

    The engine's thread counts and observes; gauges are read when they are scraped. Times are seconds.
    """

    def __init__(self, engine: Engine, model_name: str, num_queued: Callable[[], int]) -> None:
        """num_queued: requests that have not reached the engine yet."""
        self.engine = engine
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        scheduler, blocks = engine.scheduler, engine.blocks
        self._gauge(
            "num_requests_running", "Number of requests in model execution batches.", lambda: len(scheduler.running)
        )
        self._gauge(
            "num_requests_waiting",
            "Number of requests waiting to be processed.",
            lambda: len(scheduler.waiting) + num_queued(),
        )
        self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda: blocks.usage)
        self.preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self.generation_tokens = self._counter("generation_tokens", "Number of generation tokens processed.")
        self.finished = self._counters(
            "request_success", "Count of successfully processed requests.", "finished_reason", FINISH_REASONS
        )
        self.first_token = self._histogram("time_to_first_token", "time to first token", FIRST_TOKEN)
        self.between_tokens = self._histogram("inter_token_latency", "inter-token latency", BETWEEN_TOKENS)
        self.whole_request = self._histogram("e2e_request_latency", "e2e request latency", WHOLE_REQUEST)
        self.queue_time = self._histogram(
            "request_queue_time", "time spent in WAITING phase for request", WHOLE_REQUEST
        )
        self._last_preemptions = 0
        # counters of totals that not every engine keeps, by the name that they have in its statistics
        texts = {
            "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
            "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
        }
        self._totals = {n: self._counter(n, text) for n, text in texts.items() if hasattr(engine.stats, n)}
        self._last_totals = dict.fromkeys(self._totals, 0)
        if engine.drafter is not None:
            self.drafts = self._counter("spec_decode_num_drafts", "Number of spec decoding drafts.")
            self.draft_tokens = self._counter("spec_decode_num_draft_tokens", "Number of draft tokens.")
            self.accepted_tokens = self._counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.")
            positions = [str(i) for i in range(engine.num_speculative_tokens)]
            self.accepted_at = self._counters(
                "spec_decode_num_accepted_tokens_per_pos",
                "Accepted tokens per draft position.",
                "position",
                positions,
            )
            self._last = (0, 0, 0)
            self._last_at = [0] * len(positions)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        gauge = Gauge(f"vllm:{name}", text, list(self._labels), registry=self.registry)
        gauge.labels(**self._labels).set_function(value)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(f"vllm:{name}", text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counters(self, name: str, text: str, label: str, values: Any) -> dict[str, Any]:
        counter = Counter(f"vllm:{name}", text, [*self._labels, label], registry=self.registry)
        return {value: counter.labels(**self._labels, **{label: value}) for value in values}

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        histogram = Histogram(
            f"vllm:{name}_seconds",
            f"Histogram of {text} in seconds.",
            list(self._labels),
            buckets=buckets,
            registry=self.registry,
        )
        return histogram.labels(**self._labels)

    def count_step(self) -> None:
        """Bring the counters up to the engine's totals."""
        stats = self.engine.stats
        self.preemptions.inc(stats.num_preemptions - self._last_preemptions)
        self._last_preemptions = stats.num_preemptions
        for name, counter in self._totals.items():
            value = getattr(stats, name)
            counter.inc(value - self._last_totals[name])
            self._last_totals[name] = value
        if self.engine.drafter is None:
            return
        spec = stats.spec
        now = (spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens)
        if now == self._last:
            return
        for counter, value, before in zip(
            (self.drafts, self.draft_tokens, self.accepted_tokens), now, self._last, strict=True
        ):
            counter.inc(value - before)
        self._last = now
        for i, accepted in enumerate(spec.accepted_per_pos):
            if accepted > self._last_at[i]:
                self.accepted_at[str(i)].inc(accepted - self._last_at[i])
                self._last_at[i] = accepted

    def text(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)
