"""The demo on a terminal: with colours where `rich` and a terminal are there, as plain text elsewhere."""

from __future__ import annotations

import io
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from peagle.bench.demo import Answer, SweepPoint, Total, answer_line
from peagle.bench.demo_prompts import DemoPrompt
from peagle.bench.demo_text import Piece, TokenText, WordWrap
from peagle.bench.tables import align

INDENT = "  "
MAX_WIDTH = 100  # longer lines are hard to read
MAX_BAR = 24
WIDEST_TOTALS = 84  # columns of the final table without its bars
HEADINGS = ("", "tokens", "seconds", "tokens/s", "acceptance length", "speed-up")


def table_cells(row: Total) -> list[str]:
    """A row of the final table, in the order of HEADINGS."""
    return [
        f"{row.name}, K = {row.k}" if row.k else row.name,
        str(row.num_tokens),
        f"{row.seconds:.1f}",
        f"{row.tokens_per_second:.1f}",
        f"{row.acceptance_length:.2f}" if row.k else "-",
        f"{row.speed_up:.2f}x",
    ]


def sweep_rows(points: Sequence[SweepPoint]) -> list[list[str]]:
    """A line a head, a column a K: tokens/s (acceptance length)."""
    ks = sorted({point.k for point in points})
    rows = [["tokens/s (AL)", *(f"K={k}" for k in ks)]]
    for name in dict.fromkeys(point.name for point in points):
        by_k = {point.k: point for point in points if point.name == name}
        cells = [f"{by_k[k].tokens_per_second:.1f} ({by_k[k].acceptance_length:.2f})" if k in by_k else "" for k in ks]
        rows.append([name, *cells])
    return rows


def _can_show(characters: str) -> bool:
    try:
        characters.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


class PlainScreen:
    """Text only: accepted drafts stand between marks."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.ascii_only = not _can_show("‹›·")
        self.open_mark, self.close_mark = ("<", ">") if self.ascii_only else ("‹", "›")
        if isinstance(sys.stdout, io.TextIOWrapper):  # an answer may hold anything
            sys.stdout.reconfigure(errors="replace")
        self._text: TokenText | None = None

    def line(self, text: str = "") -> None:
        print(text.replace(" · ", ", ") if self.ascii_only else text, flush=True)

    def note(self, text: str) -> None:
        """A line beside the main thing."""
        self.line(text)

    def legend(self) -> None:
        marked = f"{self.open_mark}accepted draft tokens{self.close_mark}"
        self.line(f"Between marks: {marked}; everything else the target wrote itself.")

    def prompt(self, index: int, total: int, prompt: DemoPrompt) -> None:
        self.line(f"\n--- {index + 1}/{total} {prompt.kind} ---\n{textwrap.indent(prompt.text, '> ')}")

    def begin(self, label: str, prompt_ids: Sequence[int]) -> None:
        self.line(f"\n[{label}]")
        self._text = TokenText(self.tokenizer, prompt_ids)

    def tokens(self, token_ids: Sequence[int], accepted: Sequence[bool]) -> None:
        assert self._text is not None
        self._print(self._text.push(token_ids, accepted))

    def end(self, answer: Answer, plain: Answer | None) -> None:
        assert self._text is not None
        self._print(self._text.finish())
        self.line(f"\n({answer_line(answer, plain)})")

    def _print(self, pieces: Sequence[Piece]) -> None:
        for text, is_draft in pieces:
            words = text.strip() if is_draft else ""
            if words:  # white space stays outside the marks
                text = text.replace(words, f"{self.open_mark}{words}{self.close_mark}", 1)
            print(text, end="", flush=True)

    def sweep(self, points: Sequence[SweepPoint]) -> None:
        self.line("\n" + align(sweep_rows(points)))

    def totals(self, rows: Sequence[Total]) -> None:
        self.line("\n" + align([HEADINGS, *map(table_cells, rows)]))

    def verdict(self, text: str, good: bool) -> None:
        self.line("\n" + text)


class RichScreen(PlainScreen):
    """Colours, word wrap and tables by `rich`: accepted drafts are green (underlined where there is no colour)."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        from rich.cells import cell_len
        from rich.console import Console

        self.console = Console(highlight=False)
        self.measure = cell_len
        self.draft_style = "underline" if self.console.no_color else "green"
        self._wrap: WordWrap | None = None

    @property
    def width(self) -> int:
        return min(shutil.get_terminal_size().columns - 1, MAX_WIDTH)

    def line(self, text: str = "", style: str = "") -> None:
        self.console.print(text, style=style or None, markup=False)

    def note(self, text: str) -> None:
        self.line(text, "dim")

    def legend(self) -> None:
        from rich.text import Text

        self.console.print(
            Text.assemble(
                ("accepted draft tokens", self.draft_style),
                " look like this, the target's own tokens like this",
            )
        )

    def prompt(self, index: int, total: int, prompt: DemoPrompt) -> None:
        from rich.padding import Padding
        from rich.rule import Rule
        from rich.text import Text

        self.console.print()
        self.console.print(Rule(f"{index + 1}/{total} {prompt.kind}", style="dim"), width=self.width)
        self.console.print(Padding(Text(prompt.text, style="italic"), (0, 0, 0, 2)), width=self.width)

    def begin(self, label: str, prompt_ids: Sequence[int]) -> None:
        self.console.print()
        self.line(label, "bold cyan")
        self._text = TokenText(self.tokenizer, prompt_ids)
        self._wrap = WordWrap(self.width, INDENT, self._write, self.measure)

    def _write(self, text: str, is_draft: bool) -> None:
        style = self.draft_style if is_draft else None
        self.console.print(text, style=style, end="", markup=False, emoji=False, soft_wrap=True)

    def _print(self, pieces: Sequence[Piece]) -> None:
        assert self._wrap is not None
        self._wrap.push(pieces)

    def end(self, answer: Answer, plain: Answer | None) -> None:
        assert self._text is not None
        assert self._wrap is not None
        self._print(self._text.finish())
        self._wrap.finish()
        self.note(INDENT + answer_line(answer, plain))

    def sweep(self, points: Sequence[SweepPoint]) -> None:
        from rich import box
        from rich.table import Table

        heading, *rows = sweep_rows(points)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(heading):
            table.add_column(name, justify="left" if index == 0 else "right", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        self.console.print()
        self.console.print(table)

    def totals(self, rows: Sequence[Total]) -> None:
        from rich import box
        from rich.rule import Rule
        from rich.table import Table

        fastest = max(rows, key=lambda row: row.tokens_per_second)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, name in enumerate(HEADINGS):
            table.add_column(name, justify="left" if index == 0 else "right")
        room = min(MAX_BAR, self.console.width - WIDEST_TOTALS)
        if room > 0:
            table.add_column("", no_wrap=True)
        for row in rows:
            bar = "█" * max(1, round(room * row.tokens_per_second / (fastest.tokens_per_second or 1.0)))
            cells = [*table_cells(row), bar] if room > 0 else table_cells(row)
            table.add_row(*cells, style="bold green" if row is fastest else None)
        self.console.print()
        self.console.print(Rule(style="dim"), width=self.width)
        self.console.print(table)

    def verdict(self, text: str, good: bool) -> None:
        self.line(text, "bold green" if good else "bold red")


def make_screen(tokenizer: Any) -> PlainScreen:
    """Rich on a terminal if it is installed, plain text otherwise."""
    if not sys.stdout.isatty():
        return PlainScreen(tokenizer)
    try:
        return RichScreen(tokenizer)
    except ImportError:
        return PlainScreen(tokenizer)
