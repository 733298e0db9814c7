"""What a Prometheus scrape sees of the engine, under vLLM's names and labels, so that its dashboards work."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest

from peagle.engine.engine import Engine
from peagle.server.histogram import FastHistogram
from peagle.server.http_metrics import HttpMetrics
from peagle.server.request_metrics import RequestMetrics

FINISH_REASONS = ("stop", "length", "abort", "error")
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


class Family:
    """Makes a server's metrics, each with the labels that all have."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        self.registry, self.labels = registry, labels

    def gauge(self, name: str, text: str, value: Callable[[], float], **labels: str) -> None:
        """One that is read when it is scraped."""
        gauge = Gauge(f"vllm:{name}", text, [*self.labels, *labels], registry=self.registry)
        gauge.labels(**self.labels, **labels).set_function(value)

    def gauges(self, name: str, text: str, label: str, values: dict[str, Callable[[], float]]) -> None:
        gauge = Gauge(f"vllm:{name}", text, [*self.labels, label], registry=self.registry)
        for key, value in values.items():
            gauge.labels(**self.labels, **{label: key}).set_function(value)

    def counter(self, name: str, text: str) -> Any:
        return Counter(f"vllm:{name}", text, list(self.labels), registry=self.registry).labels(**self.labels)

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Any]:
        counter = Counter(f"vllm:{name}", text, [*self.labels, label], registry=self.registry)
        return {value: counter.labels(**self.labels, **{label: value}) for value in values}

    def histogram(self, name: str, text: str, buckets: Iterable[float]) -> FastHistogram:
        histogram = FastHistogram(f"vllm:{name}", text, self.labels, buckets)
        self.registry.register(histogram)
        return histogram


class ServerMetrics:
    """One server's counters, gauges and histograms, in a registry of their own.

    The engine's thread counts and observes, but for `rejected` and `http`, which are the event loop's; gauges are read
    when they are scraped. Times are seconds.
    """

    def __init__(self, engine: Engine, model_name: str, num_queued: Callable[[], int]) -> None:
        """num_queued: requests that have not reached the engine yet."""
        self.engine = engine
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        family = Family(self.registry, {"model_name": model_name, "engine": "0"})
        self.requests = RequestMetrics(family, engine.max_model_len)
        self.http = HttpMetrics(self.registry)
        self._state(family, num_queued)
        self.preemptions = family.counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = family.counter("prompt_tokens", "Number of prefill tokens processed.")
        self.cached_tokens = family.counter("prompt_tokens_cached", "Number of cached prompt tokens.")
        self.by_source = family.counters(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            "source",
            ("local_compute", "local_cache_hit", "external_kv_transfer"),
        )
        self.cached_on_device = family.counters(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            "source",
            ("device",),
        )["device"]
        self.generation_tokens = family.counter("generation_tokens", "Number of generation tokens processed.")
        self.step_tokens = family.histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", STEP_TOKENS
        )
        self.finished = family.counters(
            "request_success", "Count of successfully processed requests.", "finished_reason", FINISH_REASONS
        )
        self.rejected = family.counters(
            "admission_rejections",
            "Number of admission attempts rejected by a queue limit, by reason.",
            "reason",
            ("max_num_queued_reqs",),
        )["max_num_queued_reqs"]
        self._last_preemptions = 0
        # counters of the engine's totals, by the name that they have in its statistics
        texts = {
            "prefix_cache_queries": "Prefix cache queries, in terms of number of queried tokens.",
            "prefix_cache_hits": "Prefix cache hits, in terms of number of cached tokens.",
        }
        self._totals = {name: family.counter(name, text) for name, text in texts.items()}
        self._last_totals = dict.fromkeys(self._totals, 0)
        if engine.drafter is not None:
            self._drafts(family)

    def _state(self, family: Family, num_queued: Callable[[], int]) -> None:
        """What is the case at the moment of a scrape."""
        scheduler, blocks, config = self.engine.scheduler, self.engine.blocks, self.engine.config
        waiting: Callable[[], int] = lambda: len(scheduler.waiting) + num_queued()  # noqa: E731
        family.gauge(
            "num_requests_running", "Number of requests in model execution batches.", lambda: len(scheduler.running)
        )
        family.gauge("num_requests_waiting", "Number of requests waiting to be processed.", waiting)
        family.gauges(
            "num_requests_waiting_by_reason",
            "Number of waiting requests by reason.",
            "reason",
            {"capacity": waiting, "deferred": lambda: 0},
        )
        family.gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", lambda: blocks.usage)
        family.gauges(
            "engine_sleep_state",
            "Engine sleep state; awake = 0 means engine is sleeping.",
            "sleep_state",
            {"awake": lambda: 1, "weights_offloaded": lambda: 0, "discard_all": lambda: 0},
        )
        family.gauge(
            "cache_config_info",
            "Information of the LLMEngine CacheConfig",
            lambda: 1,
            block_size=str(blocks.block_size),
            num_gpu_blocks=str(blocks.num_blocks),
            cache_dtype=config.kv_cache_dtype,
            enable_prefix_caching=str(config.enable_prefix_caching),
            gpu_memory_utilization=str(config.gpu_memory_utilization),
        )

    def _drafts(self, family: Family) -> None:
        self.drafts = family.counter("spec_decode_num_drafts", "Number of spec decoding drafts.")
        self.draft_tokens = family.counter("spec_decode_num_draft_tokens", "Number of draft tokens.")
        self.accepted_tokens = family.counter("spec_decode_num_accepted_tokens", "Number of accepted tokens.")
        positions = [str(i) for i in range(self.engine.num_speculative_tokens)]
        self.accepted_at = family.counters(
            "spec_decode_num_accepted_tokens_per_pos", "Accepted tokens per draft position.", "position", positions
        )
        self._last = (0, 0, 0)
        self._last_at = [0] * len(positions)

    def prompt(self, tokens: int, cached: int) -> None:
        """A prompt is computed, but for what the prefix cache had of it."""
        self.prompt_tokens.inc(tokens)
        self.cached_tokens.inc(cached)
        self.cached_on_device.inc(cached)
        self.by_source["local_cache_hit"].inc(cached)
        self.by_source["local_compute"].inc(tokens - cached)

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
