"""`peagle serve --engine vllm`: the same command with stock vLLM as the engine; its own flags pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from peagle.errors import InputError

ENGINES = ("peagle", "vllm")


def take_engine(args: Sequence[str]) -> tuple[str, list[str]]:
    """The engine that the arguments of `peagle serve` ask for, and the arguments without it.

    It is taken out before the flags are parsed, because each engine has its own.
    """
    engine, rest = "peagle", []
    remaining = iter(args)
    for arg in remaining:
        if arg == "--engine":
            engine = next(remaining, "")
        elif arg.startswith("--engine="):
            engine = arg.partition("=")[2]
        else:
            rest.append(arg)
    if engine not in ENGINES:
        raise InputError(f"--engine: got {engine!r}, expected {' or '.join(ENGINES)}")
    return engine, rest


def serve_vllm(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Target model, before any of vLLM's flags.")],
    speculative_config: Annotated[str | None, typer.Option(metavar="JSON", help="As for vLLM.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the vLLM command and stop.")] = False,
) -> None:
    """Check the installed vLLM and the head, print the `vllm serve` command, and become it."""
    if target.startswith("-"):  # a flag of vLLM's: which of them have a value is not known here
        raise InputError(f"TARGET: got {target!r}, expected the model before any of vLLM's flags")
    from peagle.vllm.serve import run

    run(target, speculative_config, ctx.args, dry_run)
