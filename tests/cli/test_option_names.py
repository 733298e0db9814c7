"""Options are called what the documentation calls them, whichever typer is installed."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.models import OptionInfo

from peagle.cli.main import app


def commands(group: typer.Typer) -> Iterator[Callable[..., Any]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance)


def test_no_option_takes_its_name_from_its_placeholder() -> None:
    """typer 0.27 made `--PORT` of an option `port` shown as PORT; one that spells its name keeps it."""
    found = []
    for command in commands(app):
        for name, hint in typing.get_type_hints(command, include_extras=True).items():
            for info in getattr(hint, "__metadata__", ()):
                shown = (getattr(info, "metavar", None) or "").lower().replace("-", "_")
                # what is spelled first stands where the default would
                if isinstance(info, OptionInfo) and shown == name and not str(info.default).startswith("--"):
                    found.append(f"{command.__name__}: {name}")
    assert found == []
