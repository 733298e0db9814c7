"""`peagle convert`: a head in the other layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

if TYPE_CHECKING:
    from peagle.drafter.config_keys import Layout


def convert(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="A head's folder or Hub id.")],
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Folder to write.")],
    layout: Annotated[
        str,
        typer.Option(
            "--layout",
            metavar="LAYOUT",
            help="native (vLLM 0.16 and later) or speculators (as the speculators project writes heads).",
        ),
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Replace OUTPUT, a head's folder with nothing else in it.")
    ] = False,
) -> None:
    """Write a head in another layout without loss: tensors keep their bits, names and config change.

    What config.json says that the other layout has no key for is kept in it, and comes back when converted back. Stock
    vLLM and this package read both layouts.
    """
    from peagle.drafter.convert import convert_head

    written = convert_head(head, output, cast("Layout", layout), force)
    typer.echo(f"{written}: {layout} layout")
