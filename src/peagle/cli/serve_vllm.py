"""`peagle serve --engine vllm`: the same command with stock vLLM as the engine; its own flags pass through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from peagle.errors import InputError
from peagle.vllm.flags import SPECULATIVE, long_name

ENGINES = ("peagle", "vllm")


def take_engine(args: Sequence[str]) -> tuple[str, list[str]]:
    """The engine that the arguments of `peagle serve` ask for, and the arguments without it.

    It is taken out before the flags are parsed, because each engine has its own. For vLLM the speculative config's flag
    may be spelled in all of its ways, and comes out in ours; `--help=all`, vLLM's own help, comes out as --vllm-help.
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
    return engine, rest if engine == "peagle" else spell_speculative(rest)


def spell_speculative(args: Sequence[str]) -> list[str]:
    """The arguments with the speculative config's flag as it is read here. Raises InputError if it is given twice."""
    ours = [i for i, arg in enumerate(args) if long_name(arg) == SPECULATIVE]
    if len(ours) > 1:
        raise InputError(f"{SPECULATIVE}: given twice, expected it once")
    spelled = ["--vllm-help" + arg.removeprefix("--help") if arg.startswith("--help=") else arg for arg in args]
    for i in ours:
        _, equals, value = args[i].partition("=")
        spelled[i] = SPECULATIVE + equals + value
    return spelled


def show_vllm_help(wanted: str | None) -> None:
    if wanted is None:
        return
    from peagle.vllm.serve import show_help

    show_help(f"--help={wanted}")


def serve_vllm(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(metavar="TARGET", help="Target model, before any of vLLM's flags.")],
    speculative_config: Annotated[str | None, typer.Option(metavar="JSON", help="As for vLLM.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the vLLM command and stop.")] = False,
    vllm_help: Annotated[
        str | None, typer.Option("--vllm-help", hidden=True, is_eager=True, callback=show_vllm_help)
    ] = None,
) -> None:
    """Check the installed vLLM and the head, print the `vllm serve` command, and become it. All other flags are vLLM's:
    --help=all, --help=GROUP or --help=FLAG shows them in its words."""
    if target.startswith("-"):  # a flag of vLLM's: which of them have a value is not known here
        raise InputError(f"TARGET: got {target!r}, expected the model before any of vLLM's flags")
    from peagle.vllm.serve import run

    run(target, speculative_config, ctx.args, dry_run)
