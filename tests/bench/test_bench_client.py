"""The load client against a server that misbehaves: every request leaves a record that says what became of it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from peagle.bench import load_client
from peagle.bench.counters import cache_between, parse_counters, spec_between, went_down
from peagle.bench.endpoints import read_counters, reset_prefix_cache
from peagle.bench.load_client import Endpoint, Sampling, run_load
from peagle.bench.questions import Questions
from peagle.bench.records import Run
from peagle.bench.serving_metrics import request_lists, serving_metrics
from peagle.bench.workloads import Workload
from peagle.client.server_facts import read_server, root_url
from peagle.client.sse import EventBuffer
from peagle.data.prompts import make_prompt
from peagle.errors import InputError
from tests.bench.fake_server import BROKEN_EVENTS, ODD_EVENTS, ODD_USAGES, FakeServer, fake_server


def conversations(*turns: list[str]) -> Workload:
    return Workload("made up", "here", tuple(make_prompt("made up", each) for each in turns))


def load(server: FakeServer, workload: Workload, concurrency: int = 1, **settings: Any) -> Run:
    endpoint = Endpoint(server.url, "fake", "chat", **({"stall_timeout": 0.6} | settings))
    return run_load(endpoint, Questions(workload, None, 64, None), concurrency, Sampling())


def test_the_second_turn_sees_the_first_answer():
    with fake_server() as server:
        run = load(server, conversations(["hi", "and now?"], ["yo"]))
    assert [(r.conversation, r.turn, r.failure) for r in run.records] == [(0, 0, None), (0, 1, None), (1, 0, None)]
    first, second, third = server.bodies
    assert first["messages"] == [{"role": "user", "content": "hi"}]
    assert [m["content"] for m in second["messages"]] == ["hi", "one two three", "and now?"]
    assert [m["role"] for m in second["messages"]] == ["user", "assistant", "user"]
    assert third["messages"][0]["content"] == "yo"
    assert first["temperature"] == 0.0
    assert first["stream_options"] == {"include_usage": True}
    record = run.records[0]
    assert (record.output_tokens, record.prompt_tokens, record.text) == (3, 5, "one two three")
    assert record.finish_reason == "stop"
    assert len(record.itls) in (2, 3)  # the end, without text, may come with the last word or behind it
    assert 0 < record.ttft <= record.latency
    assert record.latency == pytest.approx(record.ttft + sum(record.itls))
    assert record.tpot == pytest.approx((record.latency - record.ttft) / 2)


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_closed_loop_keeps_so_many_in_flight(concurrency):
    with fake_server(behave=("slow",)) as server:
        run = load(server, conversations(*([str(i)] for i in range(6))), concurrency)
    assert server.most_at_once == concurrency
    assert [r.conversation for r in run.records] == list(range(6))
    metrics = serving_metrics(run)
    assert metrics["mean_concurrency"] == pytest.approx(concurrency, rel=0.4)


@pytest.mark.parametrize(
    ("behaviour", "failure", "words"),
    [
        ("http_500", "http", "500: "),
        ("stall", "stall", "nothing came for 0.6 s"),
        ("error_event", "stream", "the engine died"),
        ("cut_off", "stream", "ended before the answer did"),
        ("no_usage", "stream", "no usage"),
        ("not_json", "stream", "no JSON"),
        ("empty", "stream", "no token"),
        ("abort", "stream", "finish_reason is abort"),
        ("error", "stream", "finish_reason is error"),
        ("drop", "connection", ""),
    ],
)
def test_a_failure_is_recorded_with_its_words_and_in_no_average(behaviour, failure, words):
    with fake_server(behave=("ok", behaviour, "ok")) as server:
        run = load(server, conversations(["a"], ["b"], ["c"]))
    assert [r.failure for r in run.records] == [None, failure, None]
    assert words in run.records[1].error
    assert run.failures == {failure: 1}
    metrics = serving_metrics(run)
    assert (metrics["completed"], metrics["failed"]) == (2, 1)
    assert metrics["total_output_tokens"] == 6
    good = [r for r in run.records if r.failure is None]
    assert metrics["mean_e2el_ms"] == pytest.approx(1000 * sum(r.latency for r in good) / 2)
    lists = request_lists(run, detailed=False)
    assert lists["output_lens"] == [3, 0, 3]
    assert [bool(error) for error in lists["errors"]] == [False, True, False]
    assert lists["errors"][1].startswith(f"{failure}: ")


@pytest.mark.parametrize("behaviour", [*ODD_EVENTS, *ODD_USAGES])
def test_what_is_not_the_api_is_a_failed_request(behaviour):
    with fake_server(behave=("ok", behaviour, "ok")) as server:
        run = load(server, conversations(["a"], ["b"], ["c"]))
    assert [r.failure for r in run.records] == [None, "stream", None]
    words = "usage" if behaviour in ODD_USAGES or behaviour == "text_for_usage" else "another shape than the API's"
    assert words in run.records[1].error


@pytest.mark.parametrize("behaviour", BROKEN_EVENTS)
def test_what_cannot_be_read_is_a_failed_request(behaviour):
    with fake_server(behave=("ok", behaviour, "ok")) as server:
        run = load(server, conversations(["a"], ["b"], ["c"]))
    assert [r.failure for r in run.records] == [None, "stream", None]
    failed = run.records[1]
    (failed.error + failed.text).encode()  # what is kept of it can be written
    assert failed.error


def test_half_a_character_in_each_of_two_events():
    with fake_server(tokens=("a \ud83d", "\ude00", "!")) as server:
        run = load(server, conversations(["hi", "and now?"]))
    assert [(r.failure, r.text) for r in run.records] == [(None, "a \U0001f600!")] * 2
    assert server.bodies[1]["messages"][1]["content"] == "a \U0001f600!"


def test_usage_unlike_the_ids_told():
    workload = Workload("random", "here", token_ids=((1, 2, 3),) * 2)
    with fake_server(behave=("ok", "usage_above_the_limit")) as server:
        endpoint = Endpoint(server.url, "fake", "completions", return_token_ids=True)
        run = run_load(endpoint, Questions(workload, None, 100, 512), 1, Sampling())
    assert [r.failure for r in run.records] == [None, "stream"]
    assert run.records[1].error == "usage: completion_tokens is 65, expected 3, as many as token ids came"


def test_the_limit_is_the_requests_own():
    with fake_server(behave=("usage_above_the_limit",)) as server:
        assert load(server, conversations(["a"]), extra_body={"max_tokens": 65}).failures == {}
        run = load(server, conversations(["a"]), extra_body={"max_completion_tokens": 2})
    assert "is 65, expected no more than the 2 that were asked for" in run.records[0].error


@pytest.mark.parametrize(("end", "gaps"), [(2.0, [0.0, 1.0]), (3.5, [0.0, 1.0, 1.5])])
def test_a_late_end_is_the_last_tokens_arrival(monkeypatch, end, gaps):
    """An end token shows no text: the finish_reason is all that tells when it came."""

    async def chunks(*asked: object) -> AsyncIterator[tuple[float, dict[str, Any] | None]]:
        begin = time.perf_counter()
        for at, word in ((1.0, "a"), (1.0, "b"), (2.0, "c")):
            yield begin + at, {"choices": [{"delta": {"content": word}}]}
        yield begin + end, {"choices": [{"delta": {}, "finish_reason": "stop"}]}
        yield begin + 9.0, {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 4}}
        yield begin + 9.0, None

    monkeypatch.setattr(load_client, "stream_chunks", chunks)
    questions = Questions(conversations(["a"]), None, 64, None)
    (record,) = run_load(Endpoint("http://nowhere", "m", "chat"), questions, 1, Sampling()).records
    assert record.itls == pytest.approx(gaps)
    assert record.latency == pytest.approx(record.ttft + sum(gaps))
    assert record.tpot == pytest.approx((end - 1.0) / 3)


def test_an_answer_without_a_token():
    with fake_server(tokens=()) as server:  # it ends at once, and the server counts nothing
        run = load(server, conversations(["a"]))
    assert (run.failures, run.records[0].output_tokens) == ({}, 0)


def test_http_error_keeps_the_body():
    with fake_server(behave=("http_500",)) as server:
        run = load(server, conversations(["a"]))
    assert "out of memory" in run.records[0].error


def test_too_long_a_request_times_out():
    with fake_server(behave=("slow",)) as server:
        run = load(server, conversations(["a"]), request_timeout=0.2)
    assert run.failures == {"timeout": 1}
    assert run.records[0].text.startswith("one")


def test_a_failed_turn_ends_its_conversation_only():
    with fake_server(behave=("http_500", "ok")) as server:
        run = load(server, conversations(["a", "b", "c"], ["d"]))
    assert [(r.conversation, r.turn, r.failure) for r in run.records] == [(0, 0, "http"), (1, 0, None)]
    assert run.num_skipped == 2


def test_a_dead_server_is_given_up():
    with fake_server(behave=("http_500",)) as server:
        run = load(server, conversations(*([str(i)] for i in range(30))), 2, give_up_after=4)
    assert len(run.records) == 30
    assert run.failures["http"] <= 6
    assert run.failures["http"] + run.failures["not_sent"] == 30
    assert "failed in a row" in run.records[-1].error
    assert len(server.bodies) == run.failures["http"]
    metrics = serving_metrics(run)
    assert metrics["output_throughput"] == 0
    assert metrics["mean_ttft_ms"] is None  # not 0: there is none


def test_nobody_listens():
    with fake_server() as server:
        url = server.url
    run = run_load(Endpoint(url, "fake", "chat"), Questions(conversations(["a"]), None, 8, None), 1, Sampling())
    assert run.failures == {"connection": 1}
    with pytest.raises(InputError, match=r"endpoint http://127.0.0.1:\d+: no answer from /v1/models"):
        read_server(url)
    assert read_counters(url) is None
    assert reset_prefix_cache(url) is False


def test_token_ids_and_exact_lengths():
    workload = Workload("random", "here", token_ids=((1, 2, 3), (4, 5, 6)), output_len=3)
    with fake_server() as server:
        endpoint = Endpoint(server.url, "fake", "completions", return_token_ids=True, extra_body={"top_k": 5})
        run = run_load(endpoint, Questions(workload, None, 64, 512), 1, Sampling(temperature=0.5, seed=3))
    body = server.bodies[1]
    assert body["prompt"] == [4, 5, 6]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"]) == (3, 3, True)
    assert (body["seed"], body["top_k"], body["return_token_ids"]) == (1003, 5, True)
    assert run.records[0].token_ids == [7, 8, 9]


def test_the_limit_takes_the_first():
    with fake_server() as server:
        questions = Questions(conversations(["a"], ["b"], ["c"]), None, 8, None)
        run = run_load(Endpoint(server.url, "fake", "chat"), questions, 2, Sampling(), limit=2)
    assert len(run.records) == 2


def test_server_facts_and_counters():
    with fake_server() as server:
        facts = read_server(server.url)
        assert (facts.model, facts.max_model_len, facts.version) == ("fake", 512, "1.2.3")
        before = read_counters(server.url)
        load(server, conversations(["a"], ["b"]))
        after = read_counters(server.url)
        assert before is not None
        assert after is not None
        spec = spec_between(before, after)
    assert spec is not None
    assert (spec.num_drafts, spec.num_draft_tokens, spec.num_accepted_tokens) == (4, 8, 2)
    assert spec.acceptance_length == pytest.approx(1.5)
    assert spec.joint_rates == pytest.approx([0.5, 0.0])
    with fake_server(with_metrics=False) as server:
        assert read_counters(server.url) is None


def test_counters_of_replicas_add_up_and_nonsense_is_passed_over():
    text = """
    vllm:spec_decode_num_drafts_total{engine="0"} 5.0
    """.replace("    ", "")
    text += 'vllm:spec_decode_num_drafts_total{engine="1",model_name="a{b}"} 1e1\n# a comment\nnonsense\n'
    text += 'vllm:spec_decode_num_draft_tokens_total{engine="0"} NaN\nother:thing 4\n'
    found = parse_counters(text)
    assert (found.num_drafts, found.num_draft_tokens, found.has_spec) == (15, 0, True)
    assert spec_between(found, parse_counters("")) is None


def test_counters_that_begin_anew_tell_nothing():
    with fake_server(counts_anew_at=4) as server:
        before = read_counters(server.url)
        load(server, conversations(["a"], ["b"], ["c"]))
        middle = read_counters(server.url)
        load(server, conversations(["d"]))
        after = read_counters(server.url)
    assert before is not None
    assert middle is not None
    assert after is not None
    assert (went_down(before, middle), went_down(middle, after)) == (False, True)
    assert spec_between(middle, after) is None
    assert cache_between(middle, after) == (None, None)
    assert went_down(middle, parse_counters(""))


def test_events_split_anywhere():
    stream = ': ping\r\n\r\ndata: one\r\n\r\ndata: {"a":\ndata: 1}\n\ndata: é\n\n'.encode()
    for size in (1, 2, 3, 7, 100):
        buffer = EventBuffer()
        found = [e for i in range(0, len(stream), size) for e in buffer.push(stream[i : i + size])]
        assert found == ["one", '{"a":\n1}', "é"]
        assert buffer.rest == ""


def test_urls():
    assert root_url("http://a:1/v1/") == "http://a:1"
    assert root_url("https://a") == "https://a"
    with pytest.raises(InputError, match="--endpoint localhost:8000"):
        root_url("localhost:8000")
