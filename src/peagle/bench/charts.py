"""The report's figures, each a plain function from points to a matplotlib figure (no global state, no window)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from peagle.bench.chart_style import (
    COLOURS,
    INK,
    MARKERS,
    bare,
    cut_short,
    halo,
    name_of,
    new_figure,
    plain_number,
    say_instead,
    short_number,
    value_axis,
)
from peagle.bench.summary import Point, best, concurrencies, panels, ratio

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NOTHING = "nothing to compare: every run has\na failed request, or not one token"

# where a point's label stands (points right and up, alignment): a side each, since points of methods may coincide
LABELS = {
    "none": (-7, -3, "right"),
    "eagle3": (7, -9, "left"),
    "p-eagle": (7, 3, "left"),
    "endpoint": (0, -14, "center"),
}


def methods_of(points: Sequence[Point], workload: str, engine: str) -> list[str]:
    found = {p.setup.method for p in points if (p.workload, p.setup.engine) == (workload, engine)}
    return [method for method in COLOURS if method in found]


def compared(methods: Sequence[str]) -> tuple[str, str] | None:
    """Which ratio a figure writes: P-EAGLE over EAGLE-3 where both are there, else the head over plain decoding."""
    for a, b in (("p-eagle", "eagle3"), ("p-eagle", "none"), ("eagle3", "none")):
        if a in methods and b in methods:
            return a, b
    return None


def throughput_chart(points: Sequence[Point], workload: str, engine: str) -> Figure:
    """Output tokens/s over concurrency, each method at its best K, with the ratio of two of them written on (the
    P-EAGLE blog's figures 4 to 6); beside it both heads' speed-up over plain decoding."""
    methods, users = methods_of(points, workload, engine), concurrencies(points, workload, engine)
    bars = "none" in methods and len(methods) > 1
    figure = new_figure(11.0 if bars else 6.5, 4.3)
    axes = figure.subplots(1, 2, width_ratios=(1.15, 1)) if bars else [figure.subplots()]
    _rates(axes[0], points, workload, engine, methods, users)
    if bars:
        _speed_ups(axes[1], points, workload, engine, [m for m in methods if m in ("eagle3", "p-eagle")], users)
    return figure


def _rates(
    axes: Axes, points: Sequence[Point], workload: str, engine: str, methods: Sequence[str], users: Sequence[int]
) -> None:
    tops = dict.fromkeys(range(len(users)), 0.0)
    low = float("inf")
    for method in methods:
        found = [(x, best(points, engine, workload, method, c)) for x, c in enumerate(users)]
        there = [(x, p) for x, p in found if p is not None]
        if not there:
            empty = f"{name_of(method)}: nothing to compare"
            axes.plot([], [], color=COLOURS[method], marker=MARKERS[method], label=empty)
            continue
        xs, rates = [x for x, _ in there], [p.rate for _, p in there]
        spans = np.array([[p.rate - min(p.rates), max(p.rates) - p.rate] for _, p in there]).T
        axes.errorbar(
            xs, rates, yerr=spans, color=COLOURS[method], marker=MARKERS[method], markersize=5.5, linewidth=2,
            capsize=2.5, label=name_of(method), zorder=3,
        )  # fmt: skip
        low = min(low, *rates)
        for x, p in there:
            tops[x] = max(tops[x], max(p.rates))
    value_axis(axes, low, max(tops.values(), default=0.0))
    pair = compared(methods)
    title = "Output tokens/s, each method at its best K"
    if pair is not None:
        title += f"\nnumbers: {name_of(pair[0])} over {name_of(pair[1])}"
        for x, c in enumerate(users):
            found_ratio = ratio(points, engine, workload, *pair, c)
            if found_ratio is not None:
                axes.annotate(
                    f"{found_ratio.value:.2f}×", (x, tops[x]), xytext=(0, 8), textcoords="offset points", ha="center",
                    fontsize=9.5, fontweight="bold", color=COLOURS[pair[0]],
                )  # fmt: skip
    if not any(tops.values()):
        say_instead(axes, NOTHING)
    axes.set_title(title)
    axes.set_xticks(range(len(users)), [str(c) for c in users])
    axes.set_xlim(-0.4, len(users) - 0.6)
    axes.set_xlabel("concurrency (users at once)")
    bare(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, loc="lower right" if len(users) > 1 else "best")


def _speed_ups(
    axes: Axes, points: Sequence[Point], workload: str, engine: str, methods: Sequence[str], users: Sequence[int]
) -> None:
    width = min(0.8 / max(len(methods), 1), 0.36)
    top = 1.0
    drawn: set[str] = set()
    for index, method in enumerate(methods):
        for x, c in enumerate(users):
            found = ratio(points, engine, workload, method, "none", c)
            if found is None:
                continue
            where = x + (index - (len(methods) - 1) / 2) * width
            span = [[found.value - found.low], [found.high - found.value]]
            axes.bar(where, found.value, width * 0.92, color=COLOURS[method], zorder=2,
                     label=None if method in drawn else name_of(method))  # fmt: skip
            drawn.add(method)
            if found.high > found.low:
                axes.errorbar(where, found.value, yerr=span, color=INK, capsize=2, linewidth=1, zorder=3)
            small = 7.0 if len(users) * len(methods) > 8 else 8.5
            axes.annotate(f"{found.value:.2f}", (where, found.high), xytext=(0, 3), textcoords="offset points",
                          ha="center", fontsize=small)  # fmt: skip
            axes.annotate(f"K={found.a.setup.k}" if small > 8 else str(found.a.setup.k), (where, 0), xytext=(0, 4),
                          textcoords="offset points", ha="center", fontsize=small, color="white")  # fmt: skip
            top = max(top, found.high)
    axes.axhline(1.0, color=COLOURS["none"], linewidth=1.4, zorder=4)
    axes.set_ylim(0, top * 1.22)
    axes.set_title("Speed-up over no speculation\nwhite: the K that was best")
    axes.set_xticks(range(len(users)), [str(c) for c in users])
    axes.set_xlim(-0.5, len(users) - 0.5)
    axes.set_xlabel("concurrency (users at once)")
    bare(axes)
    if drawn:
        axes.legend(frameon=False, loc="upper right", ncols=2)
    else:
        say_instead(axes, "nothing to compare: at no concurrency\nare there both a head and no speculation")


def overview_chart(points: Sequence[Point]) -> Figure:
    """Every method at its best K at the lowest concurrency, a group of bars a workload and engine (figure 1)."""
    shown = panels(points)
    rows: list[tuple[str, str, Point, float | None]] = []
    for workload, engine in shown:
        c = min(concurrencies(points, workload, engine))
        plain = best(points, engine, workload, "none", c)
        for method in methods_of(points, workload, engine):
            point = best(points, engine, workload, method, c)
            if point is not None:
                group = f"{cut_short(workload)}\n{cut_short(engine)}, C={c}"
                rows.append((group, method, point, point.rate / plain.rate if plain is not None else None))
    figure = new_figure(10.5, max(2.0, 0.34 * len(rows) + 0.3 * len(shown) + 0.9))
    axes = figure.subplots()
    y, ticks, labels = 0.0, [], []
    for group in dict.fromkeys(row[0] for row in rows):
        members = [row for row in rows if row[0] == group]
        ticks.append(y + (len(members) - 1) / 2)
        labels.append(group)
        for _, method, point, speed_up in members:
            axes.barh(y, point.rate, 0.86, color=COLOURS[method])
            text = f"{name_of(method)}{f' K={point.setup.k}' if point.setup.k else ''}: {short_number(point.rate)}"
            if speed_up is not None and method != "none":
                text += f"  ({speed_up:.2f}×)"
            axes.annotate(text, (point.rate, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=9)
            y += 1
        y += 0.8
    if not rows:
        say_instead(axes, NOTHING)
    axes.set_yticks(ticks, labels)
    axes.invert_yaxis()
    axes.set_xlim(0, max((row[2].rate for row in rows), default=1.0) * 1.42)
    axes.xaxis.set_major_formatter(plain_number)
    axes.set_xlabel("output tokens/s")
    axes.set_title("At the lowest concurrency, each method at its best K; in brackets: over no speculation")
    bare(axes, "x")
    return figure


def acceptance_chart(points: Sequence[Point], workload: str, engine: str) -> Figure | None:
    """Joint and conditional acceptance by position, each head at its largest K and the lowest concurrency where all
    requests were answered; None without drafts."""
    drafting = [
        p for p in points if (p.workload, p.setup.engine) == (workload, engine) and p.joint_rates and p.compares
    ]
    if not drafting:
        return None
    figure = new_figure(9.5, 3.6)
    joint, conditional = figure.subplots(1, 2, sharey=True)
    deepest = 1
    for method in COLOURS:
        own = [p for p in drafting if p.setup.method == method]
        if not own:
            continue
        k = max(p.setup.k for p in own)
        point = min((p for p in own if p.setup.k == k), key=lambda p: p.concurrency)
        length = point.acceptance_length
        label = f"{name_of(method)}, K={k}" + (f" (AL {length:.2f})" if length is not None else "")
        label += f"\nC={point.concurrency}, {point.answers} answers"
        deepest = max(deepest, len(point.joint_rates))
        for axes, rates in ((joint, point.joint_rates), (conditional, point.conditional_rates)):
            axes.plot(range(1, len(rates) + 1), rates, color=COLOURS[method], marker=MARKERS[method], markersize=5,
                      linewidth=2, label=label)  # fmt: skip
    joint.set_title("Joint: this draft and all before it accepted")
    conditional.set_title("Conditional: accepted, given those before")
    joint.set_ylabel("rate")
    joint.legend(frameon=False)
    for axes in (joint, conditional):
        axes.set_ylim(0, 1.04)
        axes.set_xlim(0.7, deepest + 0.3)
        axes.set_xticks(range(1, deepest + 1))
        axes.set_xlabel("draft position")
        bare(axes)
    return figure


def interactivity_chart(points: Sequence[Point], workload: str, engine: str) -> Figure:
    """What all users get over what one user gets; a point a concurrency, each method at its best K."""
    figure = new_figure(7.6, 4.4)
    axes = figure.subplots()
    rates: list[float] = []
    widest = 0.0
    for method in methods_of(points, workload, engine):
        found = [best(points, engine, workload, method, c) for c in concurrencies(points, workload, engine)]
        there = [(p, x) for p in found if p is not None and (x := p.median("per_user_throughput")) is not None]
        if not there:
            continue
        axes.plot([x for _, x in there], [p.rate for p, _ in there], color=COLOURS[method], marker=MARKERS[method],
                  markersize=5.5, linewidth=1.8, label=name_of(method))  # fmt: skip
        for p, x in there:
            aside, above, align = LABELS[method]
            axes.annotate(f"C={p.concurrency}", (x, p.rate), xytext=(aside, above), textcoords="offset points",
                          fontsize=8, color=COLOURS[method], ha=align, path_effects=halo())  # fmt: skip
            rates.append(p.rate)
            widest = max(widest, x)
    axes.set_xlim(0, widest * 1.15 or 1)
    value_axis(axes, min(rates, default=0.0), max(rates, default=0.0))
    axes.xaxis.set_major_formatter(plain_number)
    axes.set_xlabel("tokens/s of one user (1 / median TPOT)")
    axes.set_ylabel("output tokens/s of all users")
    axes.set_title("Throughput against interactivity, each method at its best K")
    bare(axes, "both")
    if rates:
        axes.legend(frameon=False)
    else:
        say_instead(axes, NOTHING)
    return figure


def lengths_chart(points: Sequence[Point]) -> Figure | None:
    """Distribution of prompt and answer together, a panel a workload, with median and P90 (figure 3)."""
    lengths: dict[str, np.ndarray] = {}
    for point in points:
        arm = point.arms[0]
        pairs = zip(arm.get("input_lens") or (), arm.get("output_lens") or (), strict=False)
        both = np.array([i + o for i, o in pairs if o])
        if both.size > len(lengths.get(point.workload, ())):
            lengths[point.workload] = both
    if not lengths:
        return None
    figure = new_figure(min(4.6 * len(lengths), 12.0) if len(lengths) > 1 else 6.8, 3.3)
    for axes, (workload, values) in zip(np.atleast_1d(figure.subplots(1, len(lengths))), lengths.items(), strict=True):
        median, p90 = np.percentile(values, [50, 90])
        axes.hist(values, bins=min(40, max(8, len(values) // 6)), color="#8fb3d9", edgecolor="white", linewidth=0.5)
        axes.set_ylim(0, 1.45 * axes.get_ylim()[1])
        for where, name, colour in ((median, "median", "#2e7d4f"), (p90, "P90", "#b3392f")):
            axes.axvline(where, color=colour, linestyle="--", linewidth=1.4)
            axes.annotate(f"{name} {where:,.0f}", (where, 1.0), xycoords=("data", "axes fraction"), xytext=(-4, -2),
                          textcoords="offset points", ha="right", va="top", rotation=90, fontsize=8.5,
                          color=colour)  # fmt: skip
        axes.set_title(cut_short(workload))
        axes.set_xlabel("prompt + answer, tokens")
        axes.set_ylabel("requests")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.set_major_formatter(plain_number)
        bare(axes)
    return figure
