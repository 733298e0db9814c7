"""How long prompts and answers are: a table by source, and the histogram of the P-EAGLE blog's figure 3."""

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from peagle.data.dataset import AnswerDataset
from peagle.data.shards import replacing
from peagle.errors import InputError


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Tokens of one kind over a set of examples."""

    tokens: int
    min: int
    median: float
    mean: float
    p90: float
    p99: float
    max: int


@dataclass(frozen=True, slots=True)
class SourceSummary:
    """One source (or all): examples, the share whose last answer was cut (by length or loop), and lengths in tokens."""

    source: str
    examples: int
    cut_share: float
    prompt: LengthSummary
    answer: LengthSummary
    total: LengthSummary


def summarise(lengths: np.ndarray) -> LengthSummary:
    """Statistics of lengths [N] in tokens, N at least 1."""
    median, p90, p99 = np.percentile(lengths, [50, 90, 99])
    return LengthSummary(
        tokens=int(lengths.sum()),
        min=int(lengths.min()),
        median=float(median),
        mean=float(lengths.mean()),
        p90=float(p90),
        p99=float(p99),
        max=int(lengths.max()),
    )


def length_table(dataset: AnswerDataset) -> list[SourceSummary]:
    """One summary a source, by name, and one over everything, named "all", at the end.

    In a conversation of several turns every user turn counts as prompt and every answer as answer.
    """
    sources = np.asarray(dataset.sources)
    cut = np.asarray(dataset.finish_reasons) != "stop"
    groups = [(str(name), sources == name) for name in np.unique(sources)]
    groups.append(("all", np.ones(len(dataset), np.bool_)))
    return [
        SourceSummary(
            source=name,
            examples=int(rows.sum()),
            cut_share=float(cut[rows].mean()),
            prompt=summarise((dataset.lengths - dataset.answer_lengths)[rows]),
            answer=summarise(dataset.answer_lengths[rows]),
            total=summarise(dataset.lengths[rows]),
        )
        for name, rows in groups
    ]


def format_table(table: list[SourceSummary]) -> str:
    """The table as text: a line for prompt, answer and total of each source."""
    width = max(len("source"), *(len(row.source) for row in table))
    head = f"{'source':<{width}}  {'examples':>8}  {'cut':>6}  {'part':<6}  {'tokens':>12}  {'min':>6}  {'median':>8}  "
    lines = [head + f"{'mean':>8}  {'P90':>8}  {'P99':>8}  {'max':>7}"]
    for row in table:
        for part in ("prompt", "answer", "total"):
            s: LengthSummary = getattr(row, part)
            first = f"{row.source:<{width}}  {row.examples:>8,}  {row.cut_share:>6.1%}" if part == "prompt" else ""
            lines.append(
                f"{first:<{width + 18}}  {part:<6}  {s.tokens:>12,}  {s.min:>6,}  {s.median:>8,.0f}  "
                f"{s.mean:>8,.0f}  {s.p90:>8,.0f}  {s.p99:>8,.0f}  {s.max:>7,}"
            )
    return "\n".join(lines)


def table_as_json(table: list[SourceSummary]) -> list[dict[str, object]]:
    """The table's rows as plain dictionaries."""
    return [asdict(row) for row in table]


def plot_lengths(lengths: np.ndarray, path: str | Path, title: str) -> None:
    """Draw the distribution of prompt plus generation lengths [N] with lines at median and P90 into a PNG file.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("--plot needs matplotlib, which is not installed: pip install matplotlib") from error
    median, p90 = np.percentile(lengths, [50, 90])
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.hist(lengths, bins=min(60, max(10, len(lengths) // 20)), color="#4c72b0", edgecolor="white", linewidth=0.4)
    axes.axvline(median, color="#55a868", linestyle="--", label=f"median {median:,.0f}")
    axes.axvline(p90, color="#c44e52", linestyle="--", label=f"P90 {p90:,.0f}")
    axes.set_xlabel("prompt + generation length (tokens)")
    axes.set_ylabel("examples")
    axes.set_title(title)
    axes.legend()
    with replacing(Path(path)) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
