"""The report: figures whose labels stay apart, and a page that a real browser shows whole, without network."""

from __future__ import annotations

import re
import shutil
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.text import Annotation

from peagle.bench import chart_style, charts
from peagle.bench.arm_lines import arm_content
from peagle.bench.arms import METHODS, Arm, plan_setups
from peagle.bench.records import Record, Run
from peagle.bench.report import distinct, write_report
from peagle.bench.results_file import open_results
from peagle.bench.summary import Point, points_of
from peagle.bench.workloads import Workload
from peagle.data.prompts import make_prompt
from peagle.engine.stats import SpecMetrics
from peagle.errors import InputError

USERS = (1, 2, 4, 8, 16, 32, 64)
ACCEPTED = {"none": 1.0, "eagle3": 2.6, "p-eagle": 3.4}


def made_up_arm(arm: Arm, workload: Workload) -> dict[str, Any]:
    """Plausible numbers: throughput grows less than the users, K costs something, repeats differ a little."""
    setup, c = arm.setup, arm.concurrency
    length = ACCEPTED[setup.method] * (1 + 0.03 * setup.k)
    cost = 1 + (0.12 if setup.method == "eagle3" else 0.02) * setup.k
    rate = 300 * c**0.85 * length / cost * (1 + 0.01 * arm.repeat)
    records = [
        Record(i, 0, 0.1 * i, 50 + i, 100 + 3 * i, 0.05, (100 + 3 * i) / (rate / c), [0.01] * 5, finish_reason="stop")
        for i in range(len(workload))
    ]
    if setup.method == "eagle3" and c == 2:
        records[0].failure, records[0].error = "http", '500: {"error": "<b>out of memory</b>"}'
    run = Run(records, sum(r.output_tokens for r in records) / rate)
    if setup.k:
        accepted = [int(100 * 0.7 ** (i + 1)) for i in range(setup.k)]
        run.spec = SpecMetrics(100, 100 * setup.k, sum(accepted), accepted, [100] * setup.k)
    check = {"num_answers": 64, "num_equal": 63, "num_missing": 0}
    check |= {"first": {"prompt": 2, "turn": 0, "index": 17, "unit": "token"}}
    note = "the server's prefix cache, if it has one, could not be emptied"
    return arm_content(arm, len(workload), run, False) | {
        "check": check,
        "command": f"serve {arm.key}",
        "notes": [note],
    }


def made_up_arms(users: tuple[int, ...] = USERS, engines: tuple[str, ...] = ("peagle", "vllm")) -> dict[str, Any]:
    workload = Workload("mt_bench", "f", tuple(make_prompt("w", [str(i)]) for i in range(64)))
    arms = [Arm(s, "mt_bench", c, r) for s in plan_setups(engines, METHODS, [3, 7]) for c in users for r in (0, 1)]
    return {arm.key: made_up_arm(arm, workload) for arm in arms}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    results = open_results(out / "results.jsonl", {"target": "org/<model>", "heads": {}, "workloads": {}})
    run = {"date": "2026-01-01", "command": "peagle bench ...", "machine": {"cpu": "x", "gpu": None}}
    results.add_run(run | {"head_paths": {"p-eagle": "heads/p"}, "workload_sources": {"mt_bench": "f.jsonl"}})
    for key, arm in made_up_arms((1, 2, 16)).items():
        results.add_arm(key, arm)
    results.add_failed_start("P-EAGLE K=9 in vllm", "the server ended with status 1\n  | CUDA out of memory", ["a"])
    text = write_report(results, [], out)
    assert "report: " in text
    return out


@pytest.mark.parametrize("users", [USERS, (1, 4), (1,)])
def test_labels_stay_apart(users):
    points = points_of(made_up_arms(users, ("peagle",)).values())
    with chart_style.drawing():
        for figure in (
            charts.throughput_chart(points, "mt_bench", "peagle"),
            charts.overview_chart(points),
            charts.interactivity_chart(points, "mt_bench", "peagle"),
        ):
            figure.draw_without_rendering()
            for axes in figure.axes:
                texts = [t for t in axes.texts if isinstance(t, Annotation) and t.get_text()]
                boxes = [(t.get_text(), t.get_window_extent()) for t in texts]
                for (a, box), (b, other) in combinations(boxes, 2):
                    assert not box.overlaps(other), f"{a!r} and {b!r}"
                for text, box in boxes:
                    assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, text


def test_the_ratio_is_written_on():
    points = points_of(made_up_arms((1, 8), ("peagle",)).values())
    with chart_style.drawing():
        figure = charts.throughput_chart(points, "mt_bench", "peagle")
    rates, speed_ups = figure.axes
    written = [t.get_text() for t in rates.texts]
    expected = (ACCEPTED["p-eagle"] * 1.21 / 1.14) / (ACCEPTED["eagle3"] * 1.09 / 1.36)
    assert written == [f"{expected:.2f}×"] * 2
    assert "P-EAGLE over EAGLE-3" in rates.get_title(loc="left")
    assert {"K=7", "K=3"} <= {t.get_text() for t in speed_ups.texts}


def test_a_single_method_and_points_without_drafts():
    points = points_of([a for a in made_up_arms((1, 2), ("peagle",)).values() if a["method"] == "none"])
    with chart_style.drawing():
        figure = charts.throughput_chart(points, "mt_bench", "peagle")
        assert len(figure.axes) == 1
        assert charts.acceptance_chart(points, "mt_bench", "peagle") is None
        charts.overview_chart(points)
    bare = [Point(p.setup, p.workload, p.concurrency, ({"output_throughput": 5.0},)) for p in points]
    with chart_style.drawing():
        assert charts.lengths_chart(bare) is None
        charts.interactivity_chart(bare, "mt_bench", "peagle")


@pytest.mark.filterwarnings("error")
def test_workloads_whose_names_are_nearly_alike_have_their_own_figures(tmp_path):
    names = ["mt_bench", "mt-bench", "MT bench", "数学", "代码", "a/b", "..", "long " * 60]
    results = open_results(tmp_path / "results.jsonl", {"target": "t"})
    for name in names:
        for key, arm in made_up_arms((1,), ("peagle",)).items():
            results.add_arm(f"{name} {key}", arm | {"workload": name})
    write_report(results, [], tmp_path / "out")
    drawn = sorted(path.name for path in (tmp_path / "out").glob("throughput-*.png"))
    assert len(drawn) == len(names)
    assert {"throughput-mt-bench-peagle.png", "throughput-mt-bench-peagle-2.png", "throughput-数学-peagle.png"} <= set(
        drawn
    )
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(set(ids)) == len(ids)


def test_names_that_are_taken_get_a_number():
    assert distinct(["a", "A", "b", "a-2", "a"]) == ["a", "A-2", "b", "a-2-2", "a-3"]


def test_nothing_to_report(tmp_path):
    results = open_results(tmp_path / "results.jsonl", {"target": "t"})
    results.add_failed_start("vllm", "no memory", ["vllm"])
    with pytest.raises(InputError, match=r"(?s)no measurement to report.*vllm: no memory"):
        write_report(results, [], tmp_path)


def test_the_page_needs_nothing_beside_it(folder):
    page = (folder / "report.html").read_text()
    assert not re.search(r'(?:src|href)="(?!#)', page)
    assert not re.search(r"@import|<script|<link", page)
    assert "&lt;b&gt;out of memory" in page  # what servers say is text
    assert "org/&lt;model&gt;" in page
    assert "CUDA out of memory" in page
    assert "prompt 3, token 18" in page
    assert page.count("<svg") == 1 + 2 * 3 + 1
    assert {p.suffix for p in folder.iterdir()} == {".html", ".png", ".jsonl"}


def browser_path() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


@pytest.mark.parametrize("width", [1280, 420])
def test_in_a_browser(folder, width, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = browser_path()
    if path is None:
        pytest.skip("no Chromium or Chrome on PATH")
    complaints: list[str] = []
    asked: list[str] = []
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": width, "height": 900})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"file://{folder}/report.html")
        assert page.title() == "Speculative decoding of org/<model>"
        # the page itself never scrolls sideways: wide tables and figures do so in their own boxes
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        figures = page.locator("figure svg")
        assert figures.count() == 8
        for i in range(figures.count()):
            box = figures.nth(i).bounding_box()
            assert box is not None
            assert box["width"] >= 380
            assert box["height"] >= 100
        hidden = "[...document.querySelectorAll('th,td')].filter(c => c.scrollWidth > c.clientWidth + 1).length"
        assert page.evaluate(hidden) == 0
        repeated = "(() => { const ids = [...document.querySelectorAll('[id]')].map(e => e.id);"
        assert page.evaluate(repeated + " return ids.length - new Set(ids).size; })()") == 0
        assert page.locator("summary").first.is_visible()
        page.screenshot(path=tmp_path / "page.png", full_page=True)
        browser.close()
    assert (tmp_path / "page.png").stat().st_size > 20_000
    assert asked == [f"file://{folder}/report.html"]
    assert not complaints
