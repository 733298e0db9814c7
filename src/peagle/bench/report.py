"""The report of a sweep: one HTML page that needs nothing beside it, PNG figures, and the table for the terminal."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.bench.results_file import ResultsFile
from peagle.bench.summary import panels, points_of
from peagle.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, TEMPLATE = "report.html", "report.html.jinja"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure: name of its PNG, what it shows (for those who do not see it), and its SVG."""

    name: str
    caption: str
    svg: str


def check_packages() -> None:
    """Refuse before hours of measuring, not after."""
    try:
        import jinja2  # noqa: F401
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(f"bench draws its report with the extra packages of peagle[bench] ({error})")


def write_report(results: ResultsFile, added: Sequence[dict[str, Any]], folder: Path) -> str:
    """Write report.html and the PNGs into `folder`; the text for the terminal comes back.

    added: arms read from elsewhere. Raises InputError when there is nothing to report or it cannot be written.
    """
    import jinja2

    from peagle.bench import arm_tables, chart_style, charts, engine_tables
    from peagle.bench import report_tables as tables

    arms = [*results.arms.values(), *added]
    if not arms:
        reasons = "".join(f"\n{setup}: {error}" for setup, error in results.failed_starts.items())
        raise InputError(f"{results.path}: holds no measurement to report{reasons}")
    points = points_of(arms)
    sections = []
    shown_panels = panels(points)
    names = distinct([f"{_file_name(workload)}-{_file_name(engine)}" for workload, engine in shown_panels])
    with chart_style.drawing():
        overview = _draw(charts.overview_chart(points), folder, "overview", "tokens/s at the lowest concurrency")
        lengths_figure = charts.lengths_chart(points)
        lengths = lengths_figure and _draw(lengths_figure, folder, "lengths", "lengths of prompt and answer together")
        for (workload, engine), where in zip(shown_panels, names, strict=True):
            about = f"{workload}, {engine}"
            acceptance = charts.acceptance_chart(points, workload, engine)
            throughput = charts.throughput_chart(points, workload, engine)
            interactivity = charts.interactivity_chart(points, workload, engine)
            figures = [_draw(throughput, folder, f"throughput-{where}", f"tokens/s over concurrency, {about}")]
            if acceptance is not None:
                figures.append(_draw(acceptance, folder, f"acceptance-{where}", f"acceptance by position, {about}"))
            figures.append(
                _draw(interactivity, folder, f"interactivity-{where}", f"throughput, interactivity, {about}")
            )
            shown = [tables.best_table(points, workload, engine), tables.acceptance_table(points, workload, engine)]
            section: dict[str, Any] = {
                "title": about,
                "figures": figures,
                "tables": [t for t in shown if t is not None],
            }
            section["all_arms"] = arm_tables.arms_table(points, workload, engine)
            section["counts"] = arm_tables.counts_table(points, workload, engine)
            sections.append(section)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )  # fmt: skip
    page = environment.get_template(TEMPLATE).render(
        title=f"Speculative decoding of {results.settings.get('target') or 'a served model'}",
        headlines=tables.headlines(points),
        overview=overview,
        lengths=lengths,
        sections=sections,
        engines=[t for w in dict.fromkeys(p.workload for p in points) for t in engine_tables.engines_tables(points, w)],
        engine_answers=engine_tables.engine_answers_table(arms),
        differences=tables.difference_table(points),
        failures=tables.failure_table(arms),
        failed_starts=results.failed_starts,
        synthetic=list(dict.fromkeys(f"{arm['label']}: {arm['synthetic']}" for arm in arms if arm.get("synthetic"))),
        notes=list(dict.fromkeys(f"{arm['label']}: {note}" for arm in arms for note in arm.get("notes") or ())),
        runs=results.runs,
        settings=results.settings,
        facts=arm_tables.facts_table(arms),
        server_commands=results.server_commands,
        commands=list(dict.fromkeys(arm["command"] for arm in arms if arm.get("command"))),
        imported=list(dict.fromkeys(arm["imported"] for arm in arms if arm.get("imported"))),
        num_arms=len(arms),
    )
    _write(folder / PAGE, page.encode("utf-8", "replace"))  # what others wrote may hold half a character
    return f"{terminal_text(results, added)}\n\nreport: {folder / PAGE}"


def terminal_text(results: ResultsFile, added: Sequence[dict[str, Any]]) -> str:
    """Best against best, what failed, and the headlines, as text."""
    from peagle.bench import report_tables as tables
    from peagle.bench.tables import align

    arms = [*results.arms.values(), *added]
    points = points_of(arms)
    blocks = []
    for workload, engine in panels(points):
        table = tables.best_table(points, workload, engine)
        blocks.append(f"{table.title}\n{align([table.head, *table.rows], left=table.left)}")
    if any(arm.get("synthetic") for point in points for arm in point.arms):
        blocks.append("SYNTHETIC ACCEPTANCE: drafts were accepted whatever they were; the answers are no text")
    failures = tables.failure_table(arms)
    if failures is not None:
        blocks.append(f"{failures.title}\n{align([failures.head, *failures.rows], left=failures.left)}")
    blocks += [f"Not measured: {setup}: {error}" for setup, error in results.failed_starts.items()]
    return "\n\n".join([*blocks, "\n".join(tables.headlines(points))])


def _draw(figure: Figure, folder: Path, name: str, caption: str) -> Drawn:
    """Write the PNG; give the SVG, made to stand inside a page."""
    png, svg = io.BytesIO(), io.StringIO()
    figure.savefig(png, format="png", dpi=150)
    _write(folder / f"{name}.png", png.getvalue())
    figure.savefig(svg, format="svg", metadata={"Date": None, "Creator": None})
    text = svg.getvalue()
    text = text[text.index("<svg") :]
    # ids are the same in every figure that matplotlib draws; in one page they must differ
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", text)
    return Drawn(name, caption, text)


def _file_name(text: str) -> str:
    """Letters of any script, digits, dots and hyphens; short enough for any file system."""
    return re.sub(r"[^\w.-]+|_+", "-", text)[:60].strip("-.") or "unnamed"


def distinct(names: Sequence[str]) -> list[str]:
    """The names, those that are there already (in whatever case: file systems differ) with a number behind them."""
    taken: set[str] = set()
    found = []
    for name in names:
        number, one = 1, name
        while one.casefold() in taken:
            number += 1
            one = f"{name}-{number}"
        taken.add(one.casefold())
        found.append(one)
    return found


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all."""
    work = path.with_name(f".{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work.write_bytes(content)
        os.replace(work, path)
    except OSError as error:
        work.unlink(missing_ok=True)
        raise InputError(f"--output: {path} cannot be written ({error.strerror or error})")
