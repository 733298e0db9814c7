"""Results files, results of others, and what follows from results."""

from __future__ import annotations

import json
import statistics
from typing import Any

import pytest

from peagle.bench.answer_check import check_answers, check_phrase
from peagle.bench.arms import (
    METHODS,
    Arm,
    Setup,
    parse_endpoint,
    parse_names,
    parse_numbers,
    plan_arms,
    plan_setups,
)
from peagle.bench.engine_tables import engines_tables
from peagle.bench.records import Record, Run
from peagle.bench.report_tables import best_table, difference_table, failure_table, headlines
from peagle.bench.results_file import open_results, read_results
from peagle.bench.summary import best, panels, points_of, ratio
from peagle.bench.time_left import TimeLeft, duration
from peagle.bench.vllm_json import read_vllm_results
from peagle.errors import InputError

RUN: dict[str, Any] = {"date": "2026-01-01", "command": "c", "machine": {}, "head_paths": {}, "workload_sources": {}}
SETTINGS = {"target": "t", "heads": {"p-eagle": "abc"}, "workloads": {"w": "123"}, "max_tokens": 8}


def test_a_file_is_continued(tmp_path):
    path = tmp_path / "new" / "results.jsonl"
    results = open_results(path, SETTINGS)
    results.add_run(RUN | {"heads": {"eagle3": "def"}, "workloads": {"v": "456"}})
    results.add_arm("a", arm("none", 0, 1, 5))
    results.add_failed_start("vllm", "no memory", ["b", "c"])
    with open(path, "a") as file:
        file.write('{"type":"arm","key":"b","du')  # killed while writing
    again = open_results(path, SETTINGS | {"workloads": {"v": "456", "new": "789"}})
    assert list(again.arms) == ["a"]
    assert again.failed_starts == {"vllm (b, c)": "no memory"}
    assert again.settings["heads"] == {"p-eagle": "abc", "eagle3": "def"}
    again.add_run(RUN)
    again.add_arm("b", arm("none", 0, 1, 5, engine="vllm"))
    last = read_results(path)
    assert list(last.arms) == ["a", "b"]
    assert [arm["run"] for arm in last.arms.values()] == [0, 1]
    assert last.failed_starts == {"vllm (c)": "no memory"}  # another arm of the setup does not excuse this one
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_failed_starts_of_earlier_versions(tmp_path):
    path = tmp_path / "results.jsonl"
    open_results(path, SETTINGS)
    with open(path, "a") as file:
        file.write('{"type":"failed_start","setup":"a","error":"x"}\n{"type":"failed_start","setup":"b","error":"y"}\n')
        file.write('{"type":"started","setup":"a"}\n')
    assert read_results(path).failed_starts == {"b": "y"}


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "results.jsonl"
    open_results(path, SETTINGS)
    with pytest.raises(InputError, match=r"max_tokens: 8 -> 9\n  workloads.w: '123' -> 'xyz'"):
        open_results(path, SETTINGS | {"max_tokens": 9, "workloads": {"w": "xyz"}})


def test_another_version_is_refused_with_both_named(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"type":"head","format":"peagle-bench","version":7,"settings":{}}\n')
    with pytest.raises(InputError, match="has format version 7, this peagle reads and writes version 1"):
        open_results(path, SETTINGS)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "no results file"), ("{}\n", "no results file"), ("no json\n", ":1: not JSON"), ("[1]\n", ":1: expected an")],
)
def test_what_is_no_results_file(tmp_path, content, words):
    path = tmp_path / "results.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=words):
        read_results(path)
    path.write_text('{"type":"head","format":"peagle-bench","version":1,"settings":{}}\n{"type":"other"}\n')
    with pytest.raises(InputError, match=":2: unknown line type 'other'"):
        read_results(path)


HEAD: dict[str, Any] = {"type": "head", "format": "peagle-bench", "version": 1, "settings": {}}
SPEC = {"num_drafts": 1, "num_draft_tokens": 2, "num_accepted_tokens": 1, "accepted_per_pos": [1, 0],
        "drafts_per_pos": [1, 1]}  # fmt: skip
FIRST = {"prompt": 0, "turn": 0, "index": 1, "unit": "token"}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (None, ":1: head: settings: missing, expected an object"),
        ({"type": "arm"}, ":2: arm: key: missing, expected a text"),
        ({"type": "arm", "k": "x"}, ":2: arm: k: got 'x', expected a whole number"),
        ({"type": "arm", "output_throughput": "fast"}, ":2: arm: output_throughput: got 'fast', expected a number"),
        ({"type": "arm", "median_ttft_ms": []}, ":2: arm: median_ttft_ms: got '\\[\\]', expected a number"),
        ({"type": "arm", "method": ["none"]}, ":2: arm: method: .*, expected one of none, eagle3, p-eagle, endpoint"),
        ({"type": "arm", "failures": {"http": "1"}}, ":2: arm: failures: .*, expected an object of whole numbers"),
        ({"type": "arm", "answers": [[0, 0]]}, ":2: arm: answers: .*, expected a list of "),
        ({"type": "arm", "spec": {**SPEC, "num_drafts": None}}, ":2: spec: num_drafts: got 'None', expected a whole"),
        ({"type": "arm", "check": {"num_answers": 1}}, ":2: check: num_equal: missing"),
        (
            {"type": "arm", "output_throughput": float("inf")},
            ":2: arm: output_throughput: got 'inf', expected a number",
        ),
        ({"type": "arm", "duration": float("nan")}, ":2: arm: duration: got 'nan', expected a number"),
        ({"type": "arm", "num_prompts": 10**40}, ":2: arm: num_prompts: got '10{40}', expected a whole number"),
        ({"type": "arm", "spec": {**SPEC, "accepted_per_pos": [10**400, 0]}}, ":2: spec: accepted_per_pos: got"),
        (
            {"type": "arm", "check": {"num_answers": 1, "num_equal": 0, "first": FIRST | {"logit_gap": "x"}}},
            ":2: first: logit_gap: got 'x', expected a number",
        ),
        (RUN | {"type": "run", "heads": None}, ":2: run: heads: got 'None', expected an object"),
        (RUN | {"type": "run", "engines": None}, ":2: run: engines: got 'None', expected an object"),
        (RUN | {"type": "run", "engines": {"a": 1}}, ":2: run: engines: .*, expected an object of objects or lists"),
        ({"type": "run", "command": "x"}, ":2: run: date: missing, expected a text"),
        ({"type": "failed_start", "error": "x"}, ":2: failed_start: setup: missing"),
        ({"type": "server_commands", "commands": {"a": 1}}, ":2: server_commands: commands: .*, expected an object of"),
    ],
)
def test_a_damaged_file_is_refused_by_line_and_field(tmp_path, line, words):
    path = tmp_path / "results.jsonl"
    if line is None:
        path.write_text(json.dumps({k: v for k, v in HEAD.items() if k != "settings"}) + "\n")
    else:
        whole = arm("p-eagle", 2, 1, 5, key="a", spec=SPEC) if line["type"] == "arm" and len(line) > 1 else {}
        path.write_text(json.dumps(HEAD) + "\n" + json.dumps(whole | line) + "\n")
    with pytest.raises(InputError, match=f"{path}{words}"):
        read_results(path)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"type": "arm", "k": ' + "9" * 5000 + "}", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ('{"type": "\\ud83d"}', "holds half a character"),
    ],
)
def test_lines_that_cannot_be_read(tmp_path, line, words):
    path = tmp_path / "results.jsonl"
    path.write_text(f"{json.dumps(HEAD)}\n{line}\n")
    with pytest.raises(InputError, match=f"{path}:2: {words}"):
        read_results(path)


def test_what_has_no_utf8_is_written_all_the_same(tmp_path):
    path = tmp_path / "results.jsonl"
    open_results(path, SETTINGS).add_failed_start("a", "it said \ud83d", ["b"])
    assert read_results(path).failed_starts == {"a (b)": "it said ?"}
    with open(path, "ab") as file:
        file.write('{"type": "é'.encode()[:-1])  # killed within a character
    assert list(read_results(path).failed_starts) == ["a (b)"]


def test_the_plan():
    setups = plan_setups(["peagle", "vllm"], METHODS, [3, 7])
    assert [(s.engine, s.method, s.k) for s in setups[:5]] == [
        ("peagle", "none", 0), ("peagle", "eagle3", 3), ("peagle", "eagle3", 7), ("peagle", "p-eagle", 3),
        ("peagle", "p-eagle", 7),
    ]  # fmt: skip
    assert setups[5].engine == "vllm"
    arms = plan_arms(setups[:2], ["w"], [1, 4], 2, interleave=False)
    assert [(a.setup.method, a.concurrency, a.repeat) for a in arms[:4]] == [
        ("none", 1, 0), ("none", 1, 1), ("none", 4, 0), ("none", 4, 1),
    ]  # fmt: skip
    rounds = plan_arms(setups[:2], ["w"], [1], 2, interleave=True)
    assert [(a.setup.method, a.repeat) for a in rounds] == [("none", 0), ("eagle3", 0), ("none", 1), ("eagle3", 1)]
    assert len({arm.key for arm in plan_arms(setups, ["w", "v"], [1, 2], 3, False)}) == 10 * 2 * 2 * 3


def test_lists_and_endpoints():
    assert parse_numbers("4, 1,4", "--k") == [1, 4]
    assert parse_names("p-eagle,none", "--methods", METHODS) == ["none", "p-eagle"]
    endpoint = parse_endpoint("http://host:8000/v1,name=gpu,method=p-eagle,k=7,model=m,api=completions")
    assert (endpoint.url, endpoint.setup) == ("http://host:8000", Setup("gpu", "p-eagle", 7))
    with pytest.raises(InputError, match="name=vllm: expected another name than an engine's here"):
        parse_endpoint("http://host:8000,name=vllm")
    assert parse_endpoint("http://host:8000").setup == Setup("host:8000", "endpoint", 0)
    for text, words in [
        ("host:8000", "expected a URL"),
        ("http://a,colour=red", "got 'colour=red'"),
        ("http://a,method=magic", "method=magic"),
        ("http://a,k=x", "k=x"),
        ("http://a,method=none,k=3", "k=3: expected 0 or nothing with method=none"),
        ("http://a,api=soap", "api=soap"),
    ]:
        with pytest.raises(InputError, match=words):
            parse_endpoint(text)
    with pytest.raises(InputError, match="--k: got '0'"):
        parse_numbers("0", "--k")
    with pytest.raises(InputError, match="--methods: got 'medusa'"):
        parse_names("medusa", "--methods", METHODS)


def arm(method: str, k: int, c: int, rate: float, **more: Any) -> dict[str, Any]:
    setup = Setup("peagle", method, k)
    line = {"workload": "w", "concurrency": c, "label": setup.label, "output_throughput": rate, "failed": 0,
            "completed": 4, "notes": [], "errors": []}  # fmt: skip
    return {"engine": "peagle", "method": method, "k": k} | line | more


def test_best_against_best_by_hand():
    arms = [
        *(arm("none", 0, 1, rate) for rate in (10, 10.2, 9.8)),
        *(arm("eagle3", 3, 1, rate) for rate in (15, 15.3, 14.7)),
        *(arm("eagle3", 7, 1, rate) for rate in (12, 12, 12)),
        *(arm("p-eagle", 3, 1, rate) for rate in (16, 15.2, 15.6)),
        arm("p-eagle", 7, 1, 30, failed=1, failures={"stall": 1}, errors=["", "stall: nothing came for 2 s"]),
        arm("none", 0, 4, 30),
        arm("p-eagle", 7, 4, 45),
    ]
    points = points_of(arms)
    assert panels(points) == [("w", "peagle")]
    chosen = best(points, "peagle", "w", "p-eagle", 1)
    assert chosen is not None
    assert chosen.setup.k == 3  # K=7 is faster, but a request of it failed
    found = ratio(points, "peagle", "w", "p-eagle", "eagle3", 1)
    assert found is not None
    assert found.value == pytest.approx(15.6 / 15)
    assert (found.low, found.high) == (pytest.approx(15.2 / 15.3), pytest.approx(16 / 14.7))
    assert found.verdict == "inside the spread"
    deviation = (0.02**2 + (0.4 / 15.6) ** 2) ** 0.5 / 3**0.5
    assert found.resolution == pytest.approx((2.776 + 0.941) * deviation, rel=1e-3)
    plain = ratio(points, "peagle", "w", "eagle3", "none", 1)
    assert plain is not None
    assert plain.verdict == "outside the spread"
    single = ratio(points, "peagle", "w", "p-eagle", "none", 4)
    assert single is not None
    assert (single.verdict, single.resolution) == ("single runs: spread not known", None)
    assert ratio(points, "peagle", "w", "p-eagle", "eagle3", 4) is None
    table = best_table(points, "w", "peagle")
    assert table.rows[0][:4] == ("1", "10.0", "15.0 (K=3)", "15.6 (K=3); K=7 left out: 1 failed")
    assert "P-EAGLE 1.04× EAGLE-3 (inside the spread)" in headlines(points)[0]
    assert headlines(points)[0].endswith("; P-EAGLE K=7 left out: 1 failed")
    failures = failure_table(arms)
    assert failures is not None
    assert failures.rows == [("w · P-EAGLE K=7 in peagle · C=1", "4", "1 stall", "stall: nothing came for 2 s")]


@pytest.mark.parametrize("repeats", [2, 3, 5, 6, 7, 8, 9, 10, 11, 30])
def test_detectable_by_the_t_distribution(repeats):
    stats = pytest.importorskip("scipy.stats")
    rates = [10.0 + 0.1 * (i % 3) for i in range(repeats)]
    points = points_of([arm(m, k, 1, r) for m, k in (("none", 0), ("p-eagle", 3)) for r in rates])
    found = ratio(points, "peagle", "w", "p-eagle", "none", 1)
    assert found is not None
    relative = statistics.stdev(rates) / statistics.mean(rates)
    factor = sum(float(stats.t.ppf(p, 2 * (repeats - 1))) for p in (0.975, 0.8))
    assert found.resolution == pytest.approx(factor * relative * (2 / repeats) ** 0.5, rel=1e-3)


def test_acceptance_over_repeats():
    spec = {"num_drafts": 10, "num_draft_tokens": 20, "num_accepted_tokens": 12, "accepted_per_pos": [8, 4],
            "drafts_per_pos": [10, 8], "reached_per_pos": [10, 6]}  # fmt: skip
    (point,) = points_of([arm("p-eagle", 2, 1, 5, spec=spec), arm("p-eagle", 2, 1, 5, spec=spec)])
    assert point.acceptance_length == pytest.approx(2.2)
    assert point.conditional_rates == pytest.approx([0.8, 4 / 6])
    assert point.joint_rates == pytest.approx([0.8, 0.8 * 4 / 6])
    assert point.spread == 0
    del spec["reached_per_pos"]  # a server's counters: every draft counts as having all
    (point,) = points_of([arm("p-eagle", 2, 1, 5, spec=spec)])
    assert point.conditional_rates == pytest.approx([0.8, 0.5])


def record(conversation: int, turn: int, ids: list[int] | None, text: str = "", failure: Any = None) -> Record:
    return Record(conversation, turn, 0.0, token_ids=ids, text=text, failure=failure)


def test_answers_against_plain():
    plain = [[0, 0, [1, 2]], [0, 1, [3]], [1, 0, [4, 5]], [2, 0, [9]]]
    run = Run([record(0, 0, [1, 7]), record(0, 1, [8]), record(1, 0, [4, 5]), record(2, 0, [9], failure="stall")], 1.0)
    found = check_answers(plain, run)
    assert (found["num_answers"], found["num_equal"], found["num_missing"]) == (2, 1, 1)
    assert found["first"] == {"prompt": 0, "turn": 0, "index": 1, "unit": "token", "logit_gap": None}
    assert check_phrase(found) == "1 of 2 equal; first at prompt 1, token 2"
    texts = check_answers([[0, 0, "abc"], [0, 1, "same"]], Run([record(0, 0, None, "abd"), record(0, 1, None, "x")], 1))
    assert check_phrase(texts) == "0 of 1 equal; first at prompt 1, character 3"
    mixed = check_answers([[0, 0, "abc"]], Run([record(0, 0, [1])], 1))
    assert (mixed["num_answers"], mixed["num_missing"]) == (0, 1)
    table = difference_table(points_of([arm("p-eagle", 3, 1, 5, check=found)]))
    assert table is not None
    assert table.rows == [("w · P-EAGLE K=3 in peagle", "1 of 2", "prompt 1, token 2")]


def test_engines_side_by_side():
    spec = {"num_drafts": 10, "num_draft_tokens": 20, "num_accepted_tokens": 10, "accepted_per_pos": [8, 2],
            "drafts_per_pos": [10, 10]}  # fmt: skip
    arms = [arm("none", 0, c, 10.0 * c) for c in (1, 4)] + [arm("p-eagle", 2, 1, 30, spec=spec)]
    other = [a | {"engine": "vllm", "output_throughput": a["output_throughput"] / 2} for a in arms]
    other[2] |= {"spec": spec | {"num_accepted_tokens": 11}}
    rates, lengths = engines_tables(points_of([*arms, *other]), "w")
    assert rates.rows == [("no speculation", "2.00×", "2.00×"), ("P-EAGLE K=2", "2.00×", "")]
    assert lengths.rows == [("P-EAGLE K=2", "2.000", "2.100", "+5.0 %", "")]
    assert engines_tables(points_of(arms), "w") == []


VLLM = {
    "date": "20260101-000000", "backend": "openai-chat", "model_id": "m", "num_prompts": 80, "max_concurrency": 4,
    "request_rate": "inf", "duration": 10.0, "completed": 80, "failed": 0, "total_input_tokens": 100,
    "total_output_tokens": 4000, "request_throughput": 8.0, "output_throughput": 400.0, "mean_ttft_ms": 30.0,
    "median_ttft_ms": 28.0, "median_tpot_ms": 8.0, "p99_tpot_ms": 9.0, "rtfx": float("nan"),
    "spec_decode_acceptance_length": 2.5, "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.2],
}  # fmt: skip


def test_results_of_vllm_bench_serve(tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(VLLM) + "\n" + json.dumps(VLLM | {"output_throughput": 410.0}))
    first, second = read_vllm_results([f"{path}:method=p-eagle:k=3:workload=mt_bench"])
    assert (first["engine"], first["method"], first["k"], first["concurrency"]) == ("vllm-bench-serve", "p-eagle", 3, 4)
    assert (first["repeat"], second["repeat"]) == (0, 1)
    assert first["per_user_throughput"] == 125.0
    (point,) = points_of([first, second])
    assert point.rate == 405
    assert point.acceptance_length == 2.5
    assert point.joint_rates == [0.8, 0.5, 0.2]
    json.dumps(first, allow_nan=False)
    told = tmp_path / "told.json"
    told.write_text(json.dumps(VLLM | {"method": "none", "workload": "w"}))  # --metadata method=none workload=w
    assert read_vllm_results([str(told)])[0]["k"] == 0


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (VLLM, "", "does not say its method"),
        (VLLM, ":method=p-eagle:workload=w", "does not say its k"),
        (VLLM, ":method=none", "does not say its workload"),
        (VLLM, ":method=ngram:workload=w", "method=ngram"),
        (VLLM, ":method=none:k=3:workload=w", "k=3: expected 0 or nothing with method=none"),
        (VLLM | {"request_rate": 5.0}, ":method=none:workload=w", "request_rate: got 5.0, expected inf"),
        (VLLM | {"ramp_up_strategy": "linear"}, ":method=none:workload=w", "ramp_up_strategy: got 'linear'"),
        ({"a": 1}, "", "no result of `vllm bench serve`"),
    ],
)
def test_results_that_cannot_be_added(tmp_path, content, options, words):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=words):
        read_vllm_results([f"{path}{options}"])


@pytest.mark.parametrize(
    ("more", "failed"),
    [
        ({}, 0),
        ({"failed": 3}, 3),
        ({"failed": None, "completed": 50}, 30),
        ({"failed": None, "errors": ["", "boom"] * 40}, 40),
        ({"failed": 2, "completed": 75, "errors": ["boom", None]}, 2),
        ({"failed": 0, "completed": 4, "num_prompts": 10}, 0),  # the data set had four prompts
        ({"failed": None, "completed": 4, "num_prompts": 10, "input_lens": [5] * 4}, 0),
        ({"failed": None, "completed": 4, "num_prompts": 10, "input_lens": [5] * 6}, 2),
    ],
)
def test_failed_requests_of_versions_that_do_not_say(tmp_path, more, failed):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(VLLM | more))
    (added,) = read_vllm_results([f"{path}:method=p-eagle:k=3:workload=w"])
    assert added["failed"] == failed
    assert added["num_prompts"] == added["completed"] + failed
    assert (best(points_of([added]), "vllm-bench-serve", "w", "p-eagle", 4) is None) == bool(failed)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"output_throughput": "fast"}, "result: output_throughput: got 'fast', expected a number"),
        ({"completed": 1.5}, "result: completed: got '1.5', expected a whole number"),
        ({"median_tpot_ms": "8 ms"}, "result: median_tpot_ms: got '8 ms', expected a number"),
        ({"failed": "no"}, "result: failed: got 'no', expected a whole number"),
        ({"output_throughput": float("nan")}, "result: output_throughput: got 'nan', expected a number"),
        ({"completed": 10**400}, "result: completed: got '1000000"),
    ],
)
def test_results_with_a_wrong_field(tmp_path, more, words):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(VLLM | more))
    with pytest.raises(InputError, match=f"--add {path}: {words}"):
        read_vllm_results([f"{path}:method=none:workload=w"])


def test_a_result_is_added_once(tmp_path):
    path, copy = tmp_path / "run.json", tmp_path / "copy.json"
    path.write_text(json.dumps(VLLM))
    copy.write_text(json.dumps(VLLM))
    for other in (path, copy, f"{path}:k=7"):
        with pytest.raises(InputError, match=f"--add .*: holds a result that --add {path}.* has, expected each once"):
            read_vllm_results([f"{path}:method=p-eagle:k=3:workload=w", f"{other}:method=p-eagle:k=3:workload=w"])
    copy.write_text(json.dumps(VLLM | {"date": "20260101-000100"}))
    added = read_vllm_results([f"{one}:method=none:workload=w" for one in (path, copy)])
    assert [arm["repeat"] for arm in added] == [0, 1]


def test_no_file_to_add(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_vllm_results([str(tmp_path / "none.json")])
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        read_vllm_results([str(tmp_path / "x.json")])


def test_time_left():
    setups = plan_setups(["peagle"], ["none", "p-eagle"], [3])
    arms = plan_arms(setups, ["w"], [1, 4], 1, False)
    left = TimeLeft([])
    assert left.seconds(arms) is None
    left.loaded(5)
    left.measured(arms[0], 100)
    assert left.seconds(arms[1:]) == pytest.approx(50 + 5 + 100 + 50)
    assert TimeLeft([Arm(setups[0], "w", 1, 0).to_dict() | {"duration": 7.0}]).seconds(arms[2:3]) == 7
    assert [duration(s) for s in (45, 720, 12_000)] == ["45 s", "12 min", "3 h 20 min"]
