"""How the report's figures look: colours, fonts, axes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from peagle.bench.arms import METHOD_NAMES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"none": "#7d838c", "eagle3": "#2f6fb0", "p-eagle": "#d9661f", "endpoint": "#4f8a5b"}
MARKERS = {"none": "s", "eagle3": "o", "p-eagle": "D", "endpoint": "^"}
INK, GRID = "#22262b", "#e3e6ea"
# of these, those that are there draw what DejaVu has no glyphs for
MORE_FONTS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Source Han Sans SC"),
    *("WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "PingFang SC", "Hiragino Sans", "Microsoft YaHei"),
    "Arial Unicode MS",
)
STYLE = {
    "font.size": 9.5, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.edgecolor": "#9aa0a8", "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.grid": False,
    "svg.hashsalt": "peagle", "svg.fonttype": "none",  # text stays text: a third of the size, and can be searched
}  # fmt: skip


@contextmanager
def drawing() -> Iterator[None]:
    """The figures' style. A name in a script that no font here has is drawn as boxes, without a warning a glyph."""
    import matplotlib
    from matplotlib.font_manager import fontManager

    there = set(fontManager.get_font_names())
    families = ["DejaVu Sans", *(name for name in MORE_FONTS if name in there)]
    with matplotlib.rc_context({**STYLE, "font.family": families}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def name_of(method: str) -> str:
    return METHOD_NAMES.get(method, method)


def cut_short(name: str) -> str:
    """A user's name for a thing, as long as axes have room for it."""
    return name if len(name) <= 32 else f"{name[:31]}…"


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; constrained layout keeps labels inside and apart."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def halo() -> list[Any]:
    """A white edge around a label that may lie on a line."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


def bare(axes: Axes, grid: str = "y") -> None:
    """Grid lines along `grid` behind the data, and no tick marks."""
    axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def say_instead(axes: Axes, text: str) -> None:
    """Text in the middle of axes that have nothing to show."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", fontsize=9.5, color=INK)


def value_axis(axes: Axes, low: float, high: float) -> None:
    """Tokens/s from zero, or logarithmic where the largest is many times the smallest."""
    axes.yaxis.set_major_formatter(plain_number)
    if high > 6 * low > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / 1.4, high * 1.7)
        axes.yaxis.set_major_formatter(plain_number)
        axes.yaxis.set_minor_formatter(minor_numbers(low, high))
    else:
        axes.set_ylim(0, high * 1.18 or 1)


def short_number(value: float) -> str:
    """For labels at bars."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def plain_number(value: float, _position: object = None) -> str:
    """For ticks."""
    return f"{value:,.0f}" if value == round(value) else f"{value:,g}"


def minor_numbers(low: float, high: float) -> Any:
    """Labels for a logarithmic axis' minor ticks, 2 and 5 only, where the decades alone would be too few."""

    def show(value: float, _position: object = None) -> str:
        digit = value / 10 ** np.floor(np.log10(value)) if value > 0 else 0
        return plain_number(value) if high / low < 1000 and round(float(digit)) in (2, 5) else ""

    return show
