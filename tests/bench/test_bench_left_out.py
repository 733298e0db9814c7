"""Requests that failed, and turns that were not asked: they are in no comparison, and every table says so."""

from __future__ import annotations

from typing import Any

import pytest

from peagle.bench import chart_style, charts
from peagle.bench.arm_tables import arms_table, counts_table, facts_table
from peagle.bench.engine_tables import engines_tables
from peagle.bench.report import terminal_text
from peagle.bench.report_tables import acceptance_table, best_table, headlines
from peagle.bench.results_file import open_results
from peagle.bench.summary import best, points_of, ratio
from tests.bench.test_bench_results import arm


def spec(accepted: int) -> dict[str, Any]:
    return {
        "num_drafts": 10, "num_draft_tokens": 20, "num_accepted_tokens": accepted, "accepted_per_pos": [8, 2],
        "drafts_per_pos": [10, 10],
    }  # fmt: skip


def in_vllm(line: dict[str, Any], **more: Any) -> dict[str, Any]:
    return line | {"engine": "vllm"} | more


def test_one_failed_repeat_leaves_the_others():
    arms = [arm("none", 0, 1, rate) for rate in (10, 11)]
    arms += [arm("p-eagle", 7, 1, 30, spec=spec(10)), arm("p-eagle", 7, 1, 32, spec=spec(10))]
    arms += [arm("p-eagle", 7, 1, 90, failed=2, spec=spec(19))]
    points = points_of(arms)
    chosen = best(points, "peagle", "w", "p-eagle", 1)
    assert chosen is not None
    assert (chosen.rates, chosen.failed, chosen.acceptance_length) == ([30, 32], 2, pytest.approx(2.0))
    found = ratio(points, "peagle", "w", "p-eagle", "none", 1)
    assert found is not None
    assert found.value == pytest.approx(31 / 10.5)
    assert best_table(points, "w", "peagle").rows[0][2] == "31.0 (K=7); 1 of 3 runs left out: 2 failed"
    acceptance = acceptance_table(points, "w", "peagle")
    assert acceptance is not None
    assert acceptance.rows[0][:2] == ("P-EAGLE K=7", "joint; 1 of 3 runs left out: 2 failed")
    counts = counts_table(points, "w", "peagle")
    assert counts.rows[1][2] == "3"
    assert counts.rows[1][-1] == "1 of 3 runs left out: 2 failed"


def test_engines_are_not_compared_where_requests_failed():
    arms = [arm("none", 0, c, 10) for c in (1, 4)] + [arm("p-eagle", 2, c, 100, spec=spec(10)) for c in (1, 4)]
    other = [in_vllm(one, output_throughput=5.0) for one in arms]
    other[2] |= {"failed": 3, "completed": 1, "spec": spec(19)}
    rates, lengths = engines_tables(points_of([*arms, *other]), "w")
    assert rates.rows == [
        ("no speculation", "2.00×", "2.00×"),
        ("P-EAGLE K=2", "left out: 3 failed in vllm", "20.00×"),
    ]
    assert lengths.rows == [("P-EAGLE K=2", "2.000", "2.000", "left out: 3 failed in vllm", "+0.0 %")]
    clean = in_vllm(arms[2], repeat=1, output_throughput=50.0)
    rates, _ = engines_tables(points_of([*arms, *other, clean]), "w")
    assert rates.rows[1][1] == "2.00×; 1 of 2 runs left out: 3 failed in vllm"


def test_acceptance_is_of_points_whose_requests_were_all_answered():
    arms = [
        arm("p-eagle", 2, 1, 100, failed=3, completed=1, spec=spec(19)),
        arm("p-eagle", 2, 4, 100, completed=9, spec=spec(10)),
        arm("eagle3", 2, 1, 100, failed=1, spec=spec(15)),
    ]
    points = points_of(arms)
    table = acceptance_table(points, "w", "peagle")
    assert table is not None
    assert table.head[:5] == ("method", "rate", "C", "answers", "acceptance length")
    assert [row[:5] for row in table.rows] == [
        ("EAGLE-3 K=2", "left out: 1 failed", "1", "", ""),
        ("P-EAGLE K=2", "joint", "4", "9", "2.00"),
        ("", "conditional", "", "", ""),
    ]
    with chart_style.drawing():
        figure = charts.acceptance_chart(points, "w", "peagle")
    assert figure is not None
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["P-EAGLE, K=2 (AL 2.00)\nC=4, 9 answers"]
    with chart_style.drawing():
        assert charts.acceptance_chart(points_of(arms[:1]), "w", "peagle") is None


def test_a_method_without_a_k_that_compares():
    points = points_of([arm("none", 0, 1, 10), arm("p-eagle", 7, 1, 30, failed=1), arm("p-eagle", 3, 1, 0)])
    assert best_table(points, "w", "peagle").rows == [("1", "10.0", "K=3 left out: no token; K=7 left out: 1 failed")]


def test_a_repeat_without_a_token_is_compared_with_nothing():
    arms = [
        arm("none", 0, 1, 10),
        arm("none", 0, 1, 0, repeat=1),
        arm("p-eagle", 3, 1, 30),
        arm("p-eagle", 3, 1, 0, repeat=1),
    ]
    points = points_of(arms)
    assert ratio(points, "peagle", "w", "p-eagle", "none", 1) is None
    left_out = "K=3 left out: no token in 1 of 2 runs"
    [row] = best_table(points, "w", "peagle").rows
    assert row[:3] == ("1", left_out.removeprefix("K=3 "), left_out)


def labels(axes):
    legend = axes.get_legend()
    return [] if legend is None else [text.get_text() for text in legend.get_texts()]


def test_a_legend_for_a_method_that_is_not_there_at_the_lowest_concurrency():
    arms = [arm("none", 0, c, 10 * c) for c in (1, 2, 4)] + [arm("eagle3", 3, 1, 5), arm("p-eagle", 3, 4, 50)]
    arms += [arm("p-eagle", 3, 1, 30, failed=1), arm("eagle3", 3, 4, 5, failed=2)]
    with chart_style.drawing():
        rates, speed_ups = charts.throughput_chart(points_of(arms), "w", "peagle").axes
    assert labels(speed_ups) == ["EAGLE-3", "P-EAGLE"]
    assert labels(rates) == ["no speculation", "EAGLE-3", "P-EAGLE"]
    assert speed_ups.get_xlim() == (-0.5, 2.5)


def test_figures_say_that_there_is_nothing_to_compare():
    arms = [arm(method, k, 1, 10, failed=1) for method, k in (("none", 0), ("p-eagle", 3))]
    points = points_of(arms)
    with chart_style.drawing():
        figures = [charts.throughput_chart(points, "w", "peagle"), charts.overview_chart(points)]
        figures.append(charts.interactivity_chart(points, "w", "peagle"))
    said = [[text.get_text() for text in axes.texts] for figure in figures for axes in figure.axes]
    assert all(len(texts) == 1 and texts[0].startswith("nothing to compare") for texts in said), said
    assert labels(figures[0].axes[0]) == ["no speculation: nothing to compare", "P-EAGLE: nothing to compare"]
    points = points_of([*arms[:1], arm("p-eagle", 3, 1, 10)])
    with chart_style.drawing():
        rates, speed_ups = charts.throughput_chart(points, "w", "peagle").axes
    assert labels(rates) == ["no speculation: nothing to compare", "P-EAGLE"]
    assert speed_ups.texts[0].get_text().startswith("nothing to compare: at no concurrency")


def test_the_terminal_shows_what_failed_and_what_was_skipped(tmp_path):
    results = open_results(tmp_path / "results.jsonl", {"target": "t"})
    results.add_arm("a", arm("none", 0, 1, 10))
    broken = {"failed": 1, "num_skipped": 8, "failures": {"http": 1}, "errors": ["http: 500: out of memory"]}
    results.add_arm("b", arm("p-eagle", 7, 1, 30, **broken))
    results.add_arm("c", arm("p-eagle", 3, 1, 20, num_skipped=3))
    results.add_failed_start("no speculation in vllm", "no memory", ["d"])
    text = terminal_text(results, [])
    assert "20.0 (K=3); K=7 left out: 1 failed" in text
    assert "Requests that failed" in text
    assert "http: 500: out of memory" in text
    assert "Not measured: no speculation in vllm (d): no memory" in text
    assert "in all arms together 11 later turns were skipped" in text
    points = points_of(results.arms.values())
    table = arms_table(points, "w", "peagle")
    place = table.head.index("skipped")
    assert [row[place] for row in table.rows] == ["0", "3", "8"]
    assert "skipped" not in headlines(points_of([arm("none", 0, 1, 10)]))[0]


def test_facts_and_counts():
    facts = {"model": "m", "version": "0.9", "device": None}
    arms = [arm("none", 0, c, 10, facts=facts, num_prompts=8, duration=2.0, total_output_tokens=1500) for c in (1, 2)]
    table = facts_table([*arms, arm("none", 0, 1, 10)])
    assert table is not None
    assert table.rows == [("no speculation in peagle", "m", "0.9", "", "")]
    assert facts_table([arm("none", 0, 1, 10)]) is None
    counts = counts_table(points_of(arms), "w", "peagle")
    assert counts.rows[0] == ("no speculation", "1", "1", "8", "4", "", "1,500", "2.0", "")
