"""Commands in README, docs and model cards: their verbs and flags exist, and none that is needed is missing."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer.main

from peagle.cli.main import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "heads").glob("*/README.md"))]
CODE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `peagle` in a page's code blocks."""
    for block in CODE.findall(page.read_text(encoding="utf-8")):
        code = block.replace("\\\n", " ")
        # a quoted JSON value may go over several lines
        for line in re.findall(r"^(?:[^'\n]|'[^']*')*$", code, re.MULTILINE):
            words = shlex.split(line, comments=True) if re.search(r"\bpeagle ", line) else []
            if "peagle" in words and words[0] != "from":
                yield words[words.index("peagle") + 1 :]


FOUND = [(page.relative_to(ROOT).as_posix(), words) for page in PAGES for words in commands(page)]


def test_commands_are_found() -> None:
    assert len(FOUND) > 20
    assert {words[0] for _, words in FOUND} >= {"data", "train", "eval", "serve", "bench", "inspect", "convert"}


@pytest.mark.parametrize(("page", "words"), FOUND, ids=[f"{page}: {' '.join(words)[:40]}" for page, words in FOUND])
def test_a_command_is_one(page: str, words: list[str]) -> None:
    command = typer.main.get_command(app)
    try:
        while hasattr(command, "resolve_command"):
            context = command.make_context("peagle", [], resilient_parsing=True)
            _, command, words = command.resolve_command(context, words)
        command.make_context(command.name, words)
    except Exception as error:  # the parser's own kinds of error have no public name
        pytest.fail(f"{page}: {error}")
