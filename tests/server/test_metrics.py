"""The scrape, read by Prometheus' own parser."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from peagle.target import Target
from tests.server.conftest import MODEL, K, Running, Start, tiny_engine

LABELS = {"model_name": MODEL, "engine": "0"}


def scrape(server: Running) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    answer = httpx.get(f"{server.url}/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items() - LABELS.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
        if sample.labels.items() >= LABELS.items()
    }


def test_metrics(start: Start, target: Target) -> None:
    server = start(tiny_engine(target))
    for _ in range(2):
        server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0, "ignore_eos": True})
    answer = server.post("/v1/completions", {"prompt": [5], "max_tokens": 10, "n": 2, "return_spec_metrics": True})
    found = scrape(server)
    assert found["vllm:prompt_tokens_total", ()] == 3 + 3 + 1 + 1
    usage = answer.json()["usage"]["completion_tokens"]
    assert found["vllm:generation_tokens_total", ()] == 40 + usage
    finished = {
        reason: found["vllm:request_success_total", (("finished_reason", reason),)]
        for reason in ("stop", "length", "abort", "error")
    }
    assert sum(finished.values()) == 4
    assert finished["length"] >= 2
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert found[f"vllm:{name}_seconds_count", ()] == 4
        assert found[f"vllm:{name}_seconds_bucket", (("le", "+Inf"),)] == 4
        assert found[f"vllm:{name}_seconds_sum", ()] > 0
    assert found["vllm:inter_token_latency_seconds_count", ()] > 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[f"vllm:{name}", ()] == 0
    spec = server.engine.stats.spec
    assert found["vllm:spec_decode_num_drafts_total", ()] == spec.num_drafts > 0
    assert found["vllm:spec_decode_num_draft_tokens_total", ()] == spec.num_draft_tokens
    assert found["vllm:spec_decode_num_accepted_tokens_total", ()] == spec.num_accepted_tokens
    per_pos = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", str(i)),)] for i in range(K)]
    assert per_pos == spec.accepted_per_pos
    assert sum(per_pos) == spec.num_accepted_tokens


def test_without_a_head_there_are_no_draft_metrics(start: Start, target: Target) -> None:
    server = start(tiny_engine(target, None))
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert not any("spec_decode" in name for name, _ in scrape(server))


@pytest.mark.parametrize("path", ["/health", "/version", "/openapi.json"])
def test_other_pages(server: Running, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 200
