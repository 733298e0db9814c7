"""Sweeps through the command line: arms, resuming, failures, and what is refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peagle.cli.bench import find_heads
from peagle.cli.demo import DEMO_TARGET
from peagle.drafter import Drafter, DrafterConfig, save_drafter
from tests.bench.fake_server import fake_server
from tests.cli.conftest import heads, run_peagle, target  # noqa: F401  (fixtures)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [{"turns": [f"first {i}", f"second {i}"]} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def arms(folder: Path) -> list[dict]:
    return [line for line in lines(folder) if line["type"] == "arm"]


def test_in_process_all_methods_then_resumed(tmp_path, target, heads, prompts):  # noqa: F811
    out = tmp_path / "out"
    common = (
        *("bench", target, "--p-eagle", heads["p-eagle"], "--eagle3", heads["eagle3"], "--workload", f"w={prompts}"),
        *("--k", "2", "--max-tokens", "6", "--device", "cpu", "--max-num-seqs", "4", "--output", out),
        *("--engine-args", '{"num_kv_blocks": 60}', "--warm-up", "1", "--max-model-len", "200"),
    )
    result = run_peagle(*common, "--concurrency", "1", "--repeats", "2")
    assert result.exit_code == 0, result.output
    found = arms(out)
    assert [(a["method"], a["k"], a["concurrency"], a["repeat"]) for a in found] == [
        (m, k, 1, r) for m, k in (("none", 0), ("eagle3", 2), ("p-eagle", 2)) for r in (0, 1)
    ]
    for arm in found:
        assert (arm["completed"], arm["failed"], arm["num_skipped"]) == (6, 0, 0)
        assert arm["total_output_tokens"] == sum(arm["output_lens"]) <= 36
        assert arm["output_throughput"] == pytest.approx(arm["total_output_tokens"] / arm["duration"])
        assert arm["max_concurrency"] == 1
    assert "answers" in found[0]
    assert all(arm["check"]["num_equal"] == 6 for arm in found[1:])
    assert found[-1]["spec_decode_acceptance_length"] >= 1
    assert len(found[-1]["spec_decode_per_position_acceptance_rates"]) == 2
    assert "P-EAGLE / EAGLE-3" in result.stdout
    assert "[6/6] P-EAGLE K=2 in peagle · w · C=1 · run 2 · about" in result.stderr
    names = {path.name for path in out.iterdir()}
    assert {"report.html", "overview.png", "throughput-w-peagle.png", "acceptance-w-peagle.png", "lengths.png"} <= names
    assert not [name for name in names if name.startswith(".")]

    again = run_peagle(*common, "--concurrency", "1,3", "--repeats", "1")
    assert again.exit_code == 0, again.output
    assert "3 of 6 arms are in the results already" in again.stderr
    assert len(arms(out)) == 9
    assert arms(out)[-1]["check"]["num_equal"] == 6
    assert len([line for line in lines(out) if line["type"] == "run"]) == 2

    # arguments of engines that are not measured do not matter
    args = ("--vllm-args", "--enforce-eager", "--serve-args", "--seed 3")
    assert "6 of 6 arms are in" in run_peagle(*common, "--concurrency", "1", "--repeats", "2", *args).stderr
    engine = run_peagle(*common, "--concurrency", "1", "--engine-args", '{"num_kv_blocks": 61}')
    assert engine.exit_code == 2
    assert "engines.peagle: {'num_kv_blocks': 60} -> {'num_kv_blocks': 61}" in engine.stderr
    other = run_peagle(*common, "--concurrency", "1", "--max-tokens", "7")
    assert other.exit_code == 2
    assert "max_tokens: 6 -> 7" in other.stderr

    report = run_peagle("bench", "--report-only", "--output", out)
    assert report.exit_code == 0, report.output
    assert "P-EAGLE / none" in report.stdout


def test_endpoints_with_failures(tmp_path, prompts):
    out = tmp_path / "out"
    with fake_server(behave=("ok",) * 7 + ("http_500", "http_500", "ok")) as plain, fake_server() as fast:
        result = run_peagle(
            *("bench", "--endpoint", f"{plain.url},name=gpu,method=none", "--warm-up", "1"),
            *("--endpoint", f"{fast.url},name=gpu,method=p-eagle,k=2", "--workload", f"w={prompts}"),
            *("--concurrency", "1,2", "--output", out, "--max-tokens", "9", "--extra-body", '{"user": "me"}'),
        )
        assert plain.bodies[0]["max_completion_tokens"] == 16  # warm-up
        assert plain.bodies[1]["max_completion_tokens"] == 9
        assert plain.bodies[1]["user"] == "me"
    assert result.exit_code == 1
    assert "0 setups did not start and 1 requests failed" in result.stderr
    found = arms(out)
    assert [(a["method"], a["concurrency"], a["completed"], a["failed"]) for a in found] == [
        ("none", 1, 6, 0), ("none", 2, 4, 1), ("p-eagle", 1, 6, 0), ("p-eagle", 2, 6, 0),
    ]  # fmt: skip
    assert found[1]["num_skipped"] == 1
    assert found[1]["notes"][0] == "C=2: of 1 warm-up requests failed 1 http"
    # the warm-up's requests are in no count
    assert found[2]["spec"]["num_drafts"] == 12
    assert found[2]["spec_decode_acceptance_length"] == pytest.approx(1.5)
    assert found[2]["prefix_cache"] == {"queries": 60, "hits": 18}
    assert found[2]["check"]["num_equal"] == 6
    assert "could not be emptied" in found[2]["notes"][0]
    assert "FAILED: 1 of 5 requests (1 http); http: 500: " in result.stderr
    page = (out / "report.html").read_text()
    assert "Requests that failed" in page
    assert "out of memory" in page


def test_arms_with_failures_are_kept_until_they_are_asked_for_again(tmp_path, prompts):
    out = tmp_path / "out"
    with fake_server(behave=("http_500", "ok")) as server:
        command = (
            *("bench", "--endpoint", f"{server.url},name=a", "--workload", f"w={prompts}", "--concurrency", "1"),
            *("--output", out, "--warm-up", "0", "--no-report"),
        )
        assert run_peagle(*command).exit_code == 1
        asked = len(server.bodies)
        assert run_peagle(*command).exit_code == 1
        assert len(server.bodies) == asked
        assert run_peagle(*command, "--retry-failed").exit_code == 0
    assert [a["failed"] for a in arms(out)] == [1, 0]
    result = run_peagle(*command[:-1], "--report-only")
    assert result.exit_code == 0
    assert "as served" in result.stdout
    assert "Requests that failed" not in (out / "report.html").read_text()


def test_a_cache_that_can_be_emptied_is(tmp_path, prompts):
    with fake_server(can_reset=True) as server:
        result = run_peagle(
            *("bench", "--endpoint", f"{server.url},name=a", "--workload", prompts, "--concurrency", "1,2"),
            *("--output", tmp_path / "out"),
        )
    assert result.exit_code == 0, result.output
    assert server.resets == 2
    assert not [note for arm in arms(tmp_path / "out") for note in arm["notes"] if "emptied" in note]


def test_a_server_that_does_not_start_is_recorded_and_the_rest_goes_on(tmp_path, target, heads, prompts):  # noqa: F811
    out = tmp_path / "out"
    command = (
        *("bench", target, "--p-eagle", heads["p-eagle"], "--workload", prompts, "--k", "2", "--concurrency", "1"),
        *("--engine", "peagle,peagle-serve", "--methods", "none", "--max-tokens", "4", "--device", "cpu"),
        *("--engine-args", '{"num_kv_blocks": 60}', "--max-model-len", "200", "--output", out),
        *("--serve-args", "--no-such-flag"),
    )
    result = run_peagle(*command)
    assert result.exit_code == 1
    assert "no speculation in peagle-serve: the server ended with status 2 before it was ready" in result.stderr
    assert "--no-such-flag" in result.stderr
    assert "1 setups did not start" in result.stderr
    assert [a["engine"] for a in arms(out)] == ["peagle"]
    assert "Not measured, because it did not start" in (out / "report.html").read_text()


@pytest.mark.slow
def test_our_server_end_to_end(tmp_path, target, heads, prompts):  # noqa: F811
    """The real server, started and stopped; the same answers as in process."""
    out = tmp_path / "out"
    result = run_peagle(
        *("bench", target, "--p-eagle", heads["p-eagle"], "--workload", f"w={prompts}", "--k", "2"),
        *("--concurrency", "2", "--engine", "peagle,peagle-serve", "--max-tokens", "8", "--device", "cpu"),
        *("--max-model-len", "200", "--output", out, "--max-num-seqs", "4", "--threads", "1", "--detailed"),
    )
    assert result.exit_code == 0, result.output
    found = arms(out)
    assert [(a["engine"], a["method"], a["failed"]) for a in found] == [
        ("peagle", "none", 0), ("peagle", "p-eagle", 0), ("peagle-serve", "none", 0), ("peagle-serve", "p-eagle", 0),
    ]  # fmt: skip
    assert all(arm["token_ids"] == found[0]["token_ids"] for arm in found)
    assert found[3]["spec"]["num_accepted_tokens"] == found[1]["spec"]["num_accepted_tokens"]
    assert found[3]["facts"]["version"]
    assert found[2]["check_engines"]["with"] == "peagle"
    assert found[2]["check_engines"]["num_equal"] == 6
    assert "Plain decoding in different engines" in (out / "report.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workload", "quick", "--k", "0"], "--k: got '0'"),
        (["--workload", "quick", "--engine", "sglang"], "--engine: got 'sglang'"),
        (["--workload", "quick", "--methods", "eagle3"], "eagle3 needs a head"),
        (["--workload", "quick", "--concurrency", "9"], "9 users need at least as many prompts"),
        (["--workload", "quick", "--engine-args", "[]"], "--engine-args: got '[]'"),
        (["--workload", "quick", "--extra-body", '{"user": "\\ud83d"}'], "--extra-body: holds half a character"),
        (["--workload", "nothing.jsonl"], "no such file"),
        ([], "--workload: missing"),
        (["--workload", "quick", "--add", "none.json"], "--add none.json: cannot be read"),
        (["--workload", "quick", "--speculative-args", '{"none": {}}'], "--speculative-args: got"),
        (["--report-only"], "results.jsonl: cannot be read"),
        (
            ["--workload", "quick", "--concurrency", "1", "--endpoint", "http://127.0.0.1:9,name=a"],
            "endpoint http://127.0.0.1:9: no answer",
        ),
    ],
)
def test_refused_before_anything_starts(tmp_path, target, arguments, words):  # noqa: F811
    out = tmp_path / "out"
    result = run_peagle("bench", target, "--output", out, *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert not out.exists()


def test_heads_that_do_not_fit(tmp_path, target, heads):  # noqa: F811
    other = DrafterConfig(
        kind="p-eagle", hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, vocab_size=60, aux_hidden_state_layer_ids=(1, 2, 3),
        max_position_embeddings=64, mask_token_id=59, k_train=4,
    )  # fmt: skip
    folder = save_drafter(Drafter(other), tmp_path / "other")
    out = tmp_path / "out"
    for head, words in ((folder, "does not fit"), (heads["eagle3"], "kind: is eagle3, expected p-eagle")):
        result = run_peagle(
            "bench", target, "--p-eagle", head, "--workload", "quick", "--concurrency", "1", "--output", out
        )
        assert result.exit_code == 2
        assert words in result.stderr
        assert not out.exists()


def test_no_target(tmp_path):
    result = run_peagle("bench", "--workload", "quick", "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert "TARGET: missing" in result.stderr


def test_fewer_prompts_for_fewer_users_and_no_report(tmp_path):
    path = tmp_path / "many.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(30)))
    out = tmp_path / "out"
    with fake_server() as server:
        result = run_peagle(
            *("bench", "--endpoint", f"{server.url},name=a,method=none", "--workload", f"w={path}", "--output", out),
            *("--concurrency", "1,12", "--prompts-per-user", "2", "--no-report", "--warm-up", "0", "--repeats", "2"),
        )
        asked = [body["messages"][0]["content"] for body in server.bodies]
    assert result.exit_code == 0, result.output
    found = arms(out)
    assert [(a["concurrency"], a["num_prompts"], a["completed"]) for a in found] == [
        (1, 8, 8), (1, 8, 8), (12, 24, 24), (12, 24, 24),
    ]  # fmt: skip
    assert asked[:8] == asked[8:16]
    assert set(asked[:8]) < set(asked[16:40])
    # the second concurrency asks more than the first kept, so it keeps its own
    assert [bool(a.get("answers")) for a in found] == [True, False, True, False]
    assert [a["check"]["num_answers"] for a in found[1:]] == [8, 8, 24]
    assert {p.name for p in out.iterdir()} == {"results.jsonl"}
    assert "output tokens/s, each at its best K" in result.stdout


def test_quick_takes_the_bundled_heads_for_the_demo_model_only():
    assert set(find_heads(DEMO_TARGET, None, None, True)) == {"eagle3", "p-eagle"}
    assert find_heads("other", None, "head", True) == {"eagle3": "head"}
    assert find_heads(DEMO_TARGET, None, None, False) == {}


def test_synthetic_acceptance_is_said_everywhere(tmp_path, target, heads):  # noqa: F811
    out = tmp_path / "out"
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5}
    result = run_peagle(
        *("bench", target, "--p-eagle", heads["p-eagle"], "--workload", "random:8:40:3", "--k", "3", "--device", "cpu"),
        *("--concurrency", "3", "--warm-up", "0", "--max-model-len", "200", "--engine-args", '{"num_kv_blocks": 60}'),
        *("--speculative-args", json.dumps({"p-eagle": synthetic}), "--output", out, "--max-num-seqs", "4"),
    )
    assert result.exit_code == 0, result.output
    plain, drafted = arms(out)
    assert drafted["output_lens"] == [40, 40, 40]
    assert drafted["spec_decode_acceptance_length"] == pytest.approx(2.5, rel=0.2)
    assert drafted["synthetic"] == synthetic
    assert "check" not in drafted
    assert "synthetic" not in plain
    assert "SYNTHETIC ACCEPTANCE" in result.stdout
    assert "Synthetic acceptance:" in (out / "report.html").read_text()
