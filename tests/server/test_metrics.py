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
    for name in ("inference", "prefill", "decode"):
        assert found[f"vllm:request_{name}_time_seconds_count", ()] == 4
    assert found["vllm:request_inference_time_seconds_sum", ()] == pytest.approx(
        found["vllm:request_prefill_time_seconds_sum", ()] + found["vllm:request_decode_time_seconds_sum", ()]
    )
    assert found["vllm:request_time_per_output_token_seconds_count", ()] >= 2
    assert found["vllm:request_prompt_tokens_sum", ()] == found["vllm:prompt_tokens_total", ()]
    assert found["vllm:request_generation_tokens_sum", ()] == found["vllm:generation_tokens_total", ()]
    assert found["vllm:request_params_max_tokens_sum", ()] == 20 + 20 + 10 + 10
    # one a prompt, whatever its n
    assert found["vllm:request_params_n_count", ()] == found["vllm:request_max_num_generation_tokens_count", ()] == 3
    assert found["vllm:request_params_n_sum", ()] == 1 + 1 + 2
    assert found["vllm:iteration_tokens_total_sum", ()] == 8 + 40 + usage
    assert found["vllm:prompt_tokens_cached_total", ()] == found["vllm:prefix_cache_hits_total", ()] == 0
    assert found["vllm:prompt_tokens_by_source_total", (("source", "local_compute"),)] == 8
    assert found["vllm:num_requests_waiting_by_reason", (("reason", "capacity"),)] == 0
    assert found["vllm:engine_sleep_state", (("sleep_state", "awake"),)] == 1
    spec = server.engine.stats.spec
    assert found["vllm:spec_decode_num_drafts_total", ()] == spec.num_drafts > 0
    assert found["vllm:spec_decode_num_draft_tokens_total", ()] == spec.num_draft_tokens
    assert found["vllm:spec_decode_num_accepted_tokens_total", ()] == spec.num_accepted_tokens
    per_pos = [found["vllm:spec_decode_num_accepted_tokens_per_pos_total", (("position", str(i)),)] for i in range(K)]
    assert per_pos == spec.accepted_per_pos
    assert sum(per_pos) == spec.num_accepted_tokens


def test_cached_prompts(start: Start, target: Target) -> None:
    server = start(tiny_engine(target))
    for _ in range(2):
        server.post("/v1/completions", {"prompt": [*range(40)], "max_tokens": 2, "temperature": 0})
    found = scrape(server)
    assert found["vllm:prompt_tokens_total", ()] == found["vllm:prefix_cache_queries_total", ()] == 80
    assert found["vllm:prompt_tokens_cached_total", ()] == found["vllm:prefix_cache_hits_total", ()] == 32
    assert found["vllm:prompt_tokens_by_source_total", (("source", "local_cache_hit"),)] == 32
    assert found["vllm:request_prefill_kv_computed_tokens_sum", ()] == 48


# what vLLM counts and its dashboards query, but for LoRA, images, KV transfer and several engines, and the residency of
# KV blocks, which vLLM has only on demand
DASHBOARDS = """
vllm:cache_config_info vllm:e2e_request_latency_seconds_bucket vllm:engine_sleep_state vllm:generation_tokens_total
vllm:inter_token_latency_seconds_bucket vllm:iteration_tokens_total_bucket vllm:kv_cache_usage_perc
vllm:num_preemptions_total vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_waiting_by_reason
vllm:prefix_cache_hits_total vllm:prefix_cache_queries_total vllm:prompt_tokens_by_source_total
vllm:prompt_tokens_cached_total vllm:prompt_tokens_total vllm:request_decode_time_seconds_sum
vllm:request_generation_tokens_bucket vllm:request_inference_time_seconds_sum
vllm:request_max_num_generation_tokens_sum vllm:request_params_max_tokens_sum vllm:request_params_n_sum
vllm:request_prefill_kv_computed_tokens_sum vllm:request_prefill_time_seconds_sum vllm:request_prompt_tokens_bucket
vllm:request_queue_time_seconds_sum vllm:request_success_total vllm:request_num_preemptions_sum
vllm:prompt_tokens_cached_by_source_total vllm:request_time_per_output_token_seconds_bucket
vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_drafts_total vllm:time_per_output_token_seconds_bucket
vllm:time_to_first_token_seconds_bucket vllm:admission_rejections_total
"""


def test_every_metric_of_the_dashboards_is_there_before_the_first_request(start: Start, target: Target) -> None:
    names = {name for name, _ in scrape(start(tiny_engine(target)))}
    assert set(DASHBOARDS.split()) <= names


def test_preemptions(start: Start, target: Target) -> None:
    server = start(tiny_engine(target, num_kv_blocks=20))
    body = {"prompt": [1, 2, 3], "max_tokens": 100, "ignore_eos": True, "n": 4}
    assert server.post("/v1/completions", body).status_code == 200
    found = scrape(server)
    assert found["vllm:request_num_preemptions_sum", ()] == found["vllm:num_preemptions_total", ()] > 0
    assert found["vllm:request_num_preemptions_count", ()] == 4


def test_http_requests(start: Start, target: Target) -> None:
    server = start(tiny_engine(target), api_keys=("secret",))
    key = {"Authorization": "Bearer secret"}
    httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "max_tokens": 1}, headers=key)
    httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "stream": True, "max_tokens": 1}, headers=key)
    httpx.post(f"{server.url}/v1/completions", json={"prompt": [1]})
    httpx.get(f"{server.url}/v1/models/alias", headers=key)
    for method in ("PROPFIND", "SEARCH"):  # whatever clients come up with is one series
        httpx.request(method, f"{server.url}/tokenize", headers=key)
    httpx.get(f"{server.url}/health")
    counted = {
        (sample.labels["handler"], sample.labels["method"], sample.labels["status"]): sample.value
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        for sample in family.samples
        if sample.name == "http_requests_total"
    }
    assert counted == {
        ("/v1/completions", "POST", "2xx"): 2,
        ("none", "POST", "4xx"): 1,  # refused before it had a route
        ("/v1/models/{name:path}", "GET", "2xx"): 1,
        ("/tokenize", "other", "4xx"): 2,
    }


def test_without_a_head_there_are_no_draft_metrics(start: Start, target: Target) -> None:
    server = start(tiny_engine(target, None))
    assert server.post("/v1/completions", {"prompt": "x"}).status_code == 200
    assert not any("spec_decode" in name for name, _ in scrape(server))


@pytest.mark.parametrize("path", ["/health", "/version", "/openapi.json"])
def test_other_pages(server: Running, path: str) -> None:
    assert httpx.get(server.url + path).status_code == 200
