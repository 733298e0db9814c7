"""Draws rows.svg, the picture of rows and mask in method.md: `python docs/draw_rows.py` (needs matplotlib)."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

matplotlib.rcParams.update({"svg.hashsalt": "rows", "font.family": "DejaVu Sans", "font.size": 9})

NTP, MTP, CHAIN, INK, GREY = "#9ec5e8", "#f6c48a", "#e8853d", "#222222", "#8a8a8a"
LAST_ANCHOR, K = 5, 4
# Training keeps some chains only: anchor -> depth of its chain.
CHAINS = {0: 2, 2: 3, 3: 1, 5: 2}


def draw_rows(ax: Axes) -> None:
    """One inference pass: the rows of six anchors and the mask rows of the last one."""
    lines = ["token in", "hidden in", "RoPE position", "predicts"]
    for i, name in enumerate(lines):
        ax.text(-0.25, 3.5 - i, name, ha="right", va="center", color=INK)
    for column in range(LAST_ANCHOR + K):
        depth = max(0, column - LAST_ANCHOR)
        anchor = column - depth
        cells = [
            f"$x_{{{anchor + 1}}}$" if depth == 0 else "mask",
            f"fc($a_{{{anchor}}}$)" if depth == 0 else "fc($m$)",
            str(anchor + depth),
            f"$x_{{{anchor + depth + 2}}}$",
        ]
        for i, text in enumerate(cells):
            colour = "white" if i == 3 else (NTP if depth == 0 else MTP)
            ax.add_patch(Rectangle((column, 3 - i), 0.94, 0.9, facecolor=colour, edgecolor=INK, linewidth=0.6))
            ax.text(column + 0.47, 3.45 - i, text, ha="center", va="center", color=INK)
        ax.text(column + 0.47, 4.25, f"({anchor}, {depth})", ha="center", va="center", color=INK)
    ax.text(-0.25, 4.25, "row (anchor, depth)", ha="right", va="center", color=INK)
    ax.annotate(
        "", xy=(LAST_ANCHOR, -0.32), xytext=(LAST_ANCHOR + K - 0.06, -0.32),
        arrowprops={"arrowstyle": "|-|,widthA=0.25,widthB=0.25", "color": INK, "linewidth": 0.9},
    )  # fmt: skip
    ax.text(LAST_ANCHOR + K / 2 - 0.03, -0.75, "the K = 4 drafts of one pass", ha="center", va="center", color=INK)
    ax.text(LAST_ANCHOR / 2 - 0.1, -0.75, "known already, not read", ha="center", va="center", color=GREY)
    ax.set(xlim=(-2.9, LAST_ANCHOR + K + 0.1), ylim=(-1.1, 4.7))
    ax.set_title("What the rows are: a request whose tokens $x_0$ to $x_6$ are known", fontsize=10, color=INK)
    ax.axis("off")


def draw_mask(ax: Axes) -> None:
    """The training mask of six anchors, four of which kept a chain."""
    rows = [(p, 0) for p in range(LAST_ANCHOR + 1)]
    rows += [(p, j) for p, depth in CHAINS.items() for j in range(1, depth + 1)]
    n = len(rows)
    for i, (p, j) in enumerate(rows):
        y = n - 1 - i
        for k, (q, d) in enumerate(rows):
            if d == 0 and q <= p:
                colour = NTP if j == 0 else MTP
            elif d >= 1 and q == p and d <= j:
                colour = CHAIN
            else:
                continue
            ax.add_patch(Rectangle((k, y), 1, 1, facecolor=colour, linewidth=0))
        label = f"({p}, {j})"
        ax.text(-0.25, y + 0.5, label, ha="right", va="center", fontsize=8, color=INK)
        ax.text(i + 0.5, n + 0.25, label, ha="center", va="bottom", fontsize=8, color=INK, rotation=60)
    for i in range(n + 1):
        ax.plot([0, n, None, i, i], [i, i, None, 0, n], color="#cccccc", linewidth=0.5)
    split = LAST_ANCHOR + 1
    ax.plot([0, n], [n - split, n - split], color=INK, linewidth=1)
    ax.plot([split, split], [0, n], color=INK, linewidth=1)
    position = n - split
    for depth in CHAINS.values():
        position -= depth
        ax.plot([0, n], [position, position], color=GREY, linewidth=0.7, linestyle=":")
    ax.text(-1.9, n / 2, "row", rotation=90, va="center", ha="center", color=INK)
    ax.text(n / 2, n + 1.55, "sees", ha="center", va="center", color=INK)
    ax.legend(
        handles=[
            Patch(facecolor=NTP, edgecolor="#cccccc", label="depth 0 sees depth 0, up to its anchor"),
            Patch(facecolor=MTP, edgecolor="#cccccc", label="depth ≥ 1 sees the same depth-0 rows"),
            Patch(facecolor=CHAIN, edgecolor="#cccccc", label="… and its own chain, up to itself"),
            Patch(facecolor="white", edgecolor="#cccccc", label="not seen"),
        ],
        loc="center",
        bbox_to_anchor=(split + (n - split) / 2, n - split / 2),
        bbox_transform=ax.transData,
        framealpha=1,
        edgecolor="white",
    )
    ax.set(xlim=(-2.3, n + 0.1), ylim=(-0.1, n + 2))
    ax.set_aspect("equal")
    ax.set_title("What they see: a training step in which four anchors kept a chain", fontsize=10, color=INK)
    ax.axis("off")


def main() -> None:
    figure = plt.figure(figsize=(8.4, 9.6))
    draw_rows(figure.add_axes((0.01, 0.68, 0.98, 0.29)))
    draw_mask(figure.add_axes((0.05, 0.01, 0.9, 0.63)))
    figure.savefig(Path(__file__).with_name("rows.svg"), metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()
