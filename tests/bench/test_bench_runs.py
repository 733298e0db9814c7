"""Whole runs of `peagle bench`: what is tried again, what is refused, caches, field names, --quick."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.bench.arms import Setup
from peagle.bench.backends import Backends, RunSettings
from peagle.bench.records import Record
from peagle.bench.serving_metrics import most_in_a_second, most_in_flight
from peagle.bench.workloads import Workload
from peagle.data.prompts import make_prompt
from peagle.errors import InputError
from tests.bench.fake_server import fake_server
from tests.cli.conftest import heads, run_peagle, target  # noqa: F401  (fixtures)

# what `vllm bench serve --save-result --save-detailed` writes
VLLM_FIELDS = (
    "date", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors",
    "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "median_tpot_ms", "std_tpot_ms",
    "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms", "mean_e2el_ms", "median_e2el_ms",
    "std_e2el_ms", "p99_e2el_ms", "spec_decode_acceptance_rate", "spec_decode_acceptance_length",
    "spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens",
    "spec_decode_per_position_acceptance_rates",
)  # fmt: skip


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "few.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i} is a number, and so is {i + 1}. Why?"}) + "\n" for i in range(3))
    )
    return path


def measure(prompts: Path, *arguments: object):
    common = ("--workload", f"w={prompts}", "--output", prompts.parent / "out")
    return run_peagle("bench", *common, *arguments)


def arms(prompts: Path) -> list[dict]:
    lines = (prompts.parent / "out" / "results.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["type"] == "arm"]


def page(prompts: Path) -> str:
    return (prompts.parent / "out" / "report.html").read_text()


def test_only_the_plans_failed_arms_are_tried_again(prompts):
    with fake_server(behave=("ok",) * 3 + ("http_500",) + ("ok",)) as server:
        command = ("--endpoint", f"{server.url},name=a,method=none", "--warm-up", "0")
        assert measure(prompts, *command, "--concurrency", "1,2").exit_code == 1
        asked = len(server.bodies)
        # C=2 failed, and is no arm of this plan
        result = measure(prompts, *command, "--concurrency", "1", "--retry-failed")
        assert result.exit_code == 1
        assert "1 requests failed" in result.stderr
        assert len(server.bodies) == asked
        assert "Requests that failed" in page(prompts)
        assert measure(prompts, *command, "--concurrency", "2", "--retry-failed").exit_code == 0
    assert [(arm["concurrency"], arm["failed"]) for arm in arms(prompts)] == [(1, 0), (2, 1), (2, 0)]
    assert arms(prompts)[-1]["check"]["with"] == 1


def test_a_failed_arm_keeps_its_line_until_a_new_one_is_there(prompts, monkeypatch):
    with fake_server(behave=("http_500", "ok")) as server:
        command = ("--endpoint", f"{server.url},name=a,method=none", "--warm-up", "0", "--concurrency", "1")
        measure(prompts, *command)

        def broken(self: Backends, given: object) -> None:
            raise InputError("the server is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Backends, "_given", broken)
            result = measure(prompts, *command, "--retry-failed")
        assert result.exit_code == 1
        assert "1 requests failed" in result.stderr
        assert "Requests that failed" in page(prompts)
        assert measure(prompts, *command, "--retry-failed").exit_code == 0


def test_a_later_start_does_not_excuse_an_arm_without_a_line(prompts, monkeypatch):
    given, tried = Backends._given, []

    def second_time_only(self: Backends, endpoint: object):
        tried.append(endpoint)
        if len(tried) == 1:
            raise InputError("did not start")
        return given(self, endpoint)

    monkeypatch.setattr(Backends, "_given", second_time_only)
    monkeypatch.setattr(Backends, "needs_fresh", lambda self, setup: True)
    with fake_server() as server:
        command = ("--endpoint", f"{server.url},name=a,method=none", "--warm-up", "0", "--concurrency", "1,2")
        result = measure(prompts, *command)
        assert result.exit_code == 1
        assert "1 setups did not start and 0 requests failed; 1 of 2 arms were not measured" in result.stderr
        assert "Not measured: no speculation in a (a/none/k0/w/c1/r0): did not start" in result.stdout
        assert "no speculation in a (a/none/k0/w/c1/r0)" in page(prompts)
        result = measure(prompts, *command)
        assert result.exit_code == 0, result.output
    assert "Not measured" not in result.stdout
    assert [arm["concurrency"] for arm in arms(prompts)] == [2, 1]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--p-eagle", "head"), ("--eagle3", "head"), ("--k", "3"), ("--methods", "none"),
        ("--engine-args", '{"num_kv_blocks": 60}'), ("--vllm-args", "--enforce-eager"), ("--serve-args", "--seed 3"),
        ("--speculative-args", '{"p-eagle": {"a": 1}}'),
    ],
)  # fmt: skip
def test_what_endpoints_cannot_be_told_is_refused(prompts, flag, value):
    result = measure(prompts, "--endpoint", "http://127.0.0.1:9,name=a", flag, value)
    assert result.exit_code == 2
    assert f"{flag}: only endpoints are measured" in result.stderr


def test_synthetic_acceptance_is_that_of_engines_started_here():
    settings = RunSettings("t", {}, speculative_args={"p-eagle": {"rejection_sample_method": "synthetic"}})
    assert settings.synthetic(Setup("vllm", "p-eagle", 3))
    assert not settings.synthetic(Setup("my-server", "p-eagle", 3))


def test_a_prefix_cache_knows_no_prompt_before_its_arm(prompts, target):  # noqa: F811
    result = measure(
        prompts, target, "--device", "cpu", "--max-tokens", "2", "--max-num-seqs", "2", "--max-model-len", "200",
        "--engine-args", '{"num_kv_blocks": 60, "enable_prefix_caching": true, "block_size": 16}', "--concurrency", "1",
        "--repeats", "2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert [arm["prefix_cache"]["hits"] for arm in arms(prompts)] == [0, 0]
    assert arms(prompts)[0]["prefix_cache"]["queries"] > 90
    assert not any(arm["notes"] for arm in arms(prompts))
    assert "<dt>prefix caching, peagle</dt><dd>on;" in page(prompts)
    assert f'<td class="words">{target}</td>' in page(prompts)  # what the engine says of itself


def test_engines_that_cache_are_made_anew(tmp_path):
    settings = RunSettings(
        "t", {}, serve_args=["--enable-prefix-caching"], engine_args={"enable_prefix_caching": False}
    )
    backends = Backends(settings, None, [], tmp_path)
    found = [backends.needs_fresh(Setup(engine, "none", 0)) for engine in ("peagle", "peagle-serve", "vllm", "other")]
    assert found == [False, True, False, False]


def test_the_warm_up_asks_other_prompts(prompts):
    with fake_server() as server:
        assert measure(prompts, "--endpoint", f"{server.url},name=a", "--concurrency", "2").exit_code == 0
        asked = [body["messages"][-1]["content"] for body in server.bodies]
    assert len(asked) == 5
    assert [text.startswith("Warm-up. ") for text in asked] == [True, True, False, False, False]
    prompt = make_prompt("s", ["one two three four", "more"], "be kind to everybody")
    other = Workload("w", "f", (prompt,)).unmeasured().prompts[0]
    assert (other.turns, other.system) == (("Warm-up. one two t",), "Warm-up. be kind to ")
    assert Workload("r", "f", token_ids=((1, 2, 3),), output_len=9).unmeasured().token_ids == ((2, 3, 1),)
    assert Workload("r", "f", token_ids=((1, 2, 3),), output_len=9).unmeasured().output_len is None


def test_names_are_those_of_vllm_bench_serve(prompts):
    with fake_server() as server:
        endpoint = f"{server.url},name=a,method=p-eagle,k=2"
        result = measure(prompts, "--endpoint", endpoint, "--concurrency", "1", "--detailed", "--no-report")
    assert result.exit_code == 0, result.output
    (arm,) = arms(prompts)
    assert [name for name in VLLM_FIELDS if name not in arm] == []
    assert (arm["model_id"], arm["tokenizer_id"], arm["burstiness"], arm["request_goodput"]) == (
        "fake",
        None,
        1.0,
        None,
    )
    assert 0 < arm["max_output_tokens_per_s"] <= 9


def test_tokens_in_the_fullest_second():
    first = Record(0, 0, 5.0, output_tokens=6, ttft=0.5, itls=[1.0, 0.1])  # 2 at 0.5 s, 2 at 1.5 s, 2 at 1.6 s
    second = Record(1, 0, 6.0, output_tokens=3, ttft=0.2)  # 3 at 1.2 s
    assert most_in_a_second([first, second]) == pytest.approx(7)
    assert most_in_a_second([]) is None


def test_requests_in_flight_in_the_fullest_second():
    """As `vllm bench serve` counts: whoever is in flight at some time of the second."""
    records = [Record(i, 0, 5.0 + start, latency=latency) for i, (start, latency) in enumerate(
        [(0.0, 0.3), (0.4, 0.3), (0.8, 0.5), (1.5, 2.0)]
    )]  # fmt: skip
    assert most_in_flight(records) == 3
    assert most_in_flight(records[2:]) == 2
    assert most_in_flight([]) == 0


def test_counters_that_begin_anew_are_a_note(prompts):
    with fake_server(counts_anew_at=6) as server:
        endpoint = ("--endpoint", f"{server.url},name=a,method=p-eagle,k=2", "--warm-up", "0", "--no-report")
        assert measure(prompts, *endpoint, "--concurrency", "1,2").exit_code == 0
    assert [arm["spec"] is None for arm in arms(prompts)] == [False, True]
    assert arms(prompts)[1]["prefix_cache"] == {"queries": None, "hits": None}
    assert any("counters went down during the arm" in note for note in arms(prompts)[1]["notes"])
    assert run_peagle("bench", "--report-only", "--output", prompts.parent / "out").exit_code == 0
    assert "counters went down during the arm" in page(prompts)


@pytest.mark.parametrize("plain_is_first", [False, True])
def test_plain_decoding_is_measured_first_and_the_fewest_users_are_the_reference(prompts, plain_is_first):
    with fake_server() as plain, fake_server() as drafts:
        both = [f"{drafts.url},name=s,method=p-eagle,k=2", f"{plain.url},name=s,method=none"]
        flags = [part for text in (both[::-1] if plain_is_first else both) for part in ("--endpoint", text)]
        common = ("--warm-up", "0", "--no-report")
        only = ("--endpoint", both[1], "--concurrency", "2")
        assert measure(prompts, *common, *only).exit_code == 0
        assert measure(prompts, *common, *flags, "--concurrency", "1,2").exit_code == 0
    found = [(a["method"], a["concurrency"], a.get("check", {}).get("with"), "answers" in a) for a in arms(prompts)]
    assert found == [
        ("none", 2, None, True),
        ("none", 1, 2, True),  # nothing else to be compared with; from now on it is the reference
        ("p-eagle", 1, 1, False),
        ("p-eagle", 2, 1, False),
    ]


def test_answers_that_are_not_compared_say_so(prompts):
    with fake_server() as server:
        endpoint = ("--endpoint", f"{server.url},name=a,method=p-eagle,k=2", "--concurrency", "1", "--warm-up", "0")
        result = measure(prompts, *endpoint)
    assert "answers were not compared with plain decoding" in result.stderr
    assert "C=1: answers were not compared with plain decoding" in arms(prompts)[0]["notes"][-1]
    assert "answers were not compared with plain decoding" in page(prompts)


def test_texts_with_other_line_ends_are_read_again(prompts):
    tokens = ("a\u2028b", "c\u2029d", "e\u0085f", "g\u000bh\x1ci")
    with fake_server(tokens=tokens) as server:
        command = ("--endpoint", f"{server.url},name=a,method=none", "--concurrency", "1", "--detailed", "--no-report")
        assert measure(prompts, *command).exit_code == 0
        asked = len(server.bodies)
        assert measure(prompts, *command).exit_code == 0
        assert len(server.bodies) == asked
    lines = (prompts.parent / "out" / "results.jsonl").read_bytes().split(b"\n")
    (arm,) = [line for line in map(json.loads, lines[:-1]) if line["type"] == "arm"]
    assert arm["generated_texts"] == ["".join(tokens)] * 3


def test_commands_of_endpoints_are_kept_and_shown(prompts):
    path = prompts.parent / "commands.json"
    path.write_text(json.dumps({"a": "serve <one>", "P-EAGLE K=2 in b": "serve two"}))
    with fake_server() as server:
        command = (
            *(
                "--endpoint",
                f"{server.url},name=a,method=none",
                "--endpoint",
                f"{server.url},name=b,method=p-eagle,k=2",
            ),
            *("--concurrency", "1", "--server-commands", path),
        )
        assert measure(prompts, *command).exit_code == 0
        assert "<pre>a: serve &lt;one&gt;</pre>" in page(prompts)
        assert "1.2.3" in page(prompts)  # the servers' version
        path.write_text('{"c": "serve three"}')
        result = measure(prompts, *command)
        assert result.exit_code == 2
        assert "'c' is no endpoint here, expected some of: a, no speculation in a, b, P-EAGLE K=2 in b" in result.stderr
    out = ("--output", prompts.parent / "out")
    assert run_peagle("bench", "--report-only", *out).exit_code == 0
    assert "<pre>P-EAGLE K=2 in b: serve two</pre>" in page(prompts)
    # results without their servers' commands can be given them
    path.write_text('{"b": "serve both"}')
    assert run_peagle("bench", "--report-only", "--server-commands", path, *out).exit_code == 0
    assert run_peagle("bench", "--report-only", *out).exit_code == 0
    assert "<pre>b: serve both</pre>" in page(prompts)
    for content, words in [("[]", "holds list"), ("{", "expected a JSON object"), ('{"b": 1}', "b: got 1, expected a")]:
        path.write_text(content)
        result = run_peagle("bench", "--report-only", "--server-commands", path, *out)
        assert result.exit_code == 2
        assert words in result.stderr


def test_quick_plans_the_demo_and_ends_with_a_report(tmp_path, target, heads, monkeypatch):  # noqa: F811
    """A tiny model stands for the demo's, whose package need not be installed."""
    monkeypatch.setattr("peagle.cli.bench.DEMO_TARGET", target)
    monkeypatch.setattr("peagle.cli.demo.DEMO_TARGET", target)
    monkeypatch.setattr("peagle.cli.demo.bundled_head", lambda flag: heads[flag.removeprefix("--")])
    out = tmp_path / "out"
    result = run_peagle(
        *("bench", "--quick", "--device", "cpu", "--output", out),
        *("--engine-args", '{"num_kv_blocks": 100}'),
    )
    assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    found = [(a["method"], a["k"], a["concurrency"], a["completed"]) for a in lines if a["type"] == "arm"]
    assert found == [
        (method, k, c, 8)
        for method, k in (("none", 0), ("eagle3", 2), ("eagle3", 4), ("p-eagle", 2), ("p-eagle", 4))
        for c in (1, 4)
    ]
    assert lines[0]["settings"]["max_tokens"] == 40
    assert lines[-1]["model_id"] == target
    assert "quick · peagle: output tokens/s, each at its best K" in result.stdout
    assert result.stdout.rstrip().endswith(f"report: {out / 'report.html'}")
    assert (out / "report.html").stat().st_size > 10_000
