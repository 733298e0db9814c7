"""The command `peagle`: its verbs, and how a user's mistake is told.

Nothing here or in a verb's module imports PyTorch at its top, so that `--help` answers at once; a verb imports what it
needs when it runs.
"""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import peagle
from peagle.cli.bench import bench
from peagle.cli.convert import convert
from peagle.cli.data import data_app
from peagle.cli.demo import demo
from peagle.cli.eval import evaluate
from peagle.cli.inspect import inspect
from peagle.cli.serve import serve
from peagle.cli.serve_vllm import serve_vllm, take_engine
from peagle.cli.train import train
from peagle.errors import InputError

USER_ERROR = 2  # as for an unknown option
VLLM_HINT = ". vLLM's other flags (several GPUs, quantisation and so on) go with --engine vllm"


class PeagleGroup(TyperGroup):
    """Turns an InputError into one line on stderr; PEAGLE_DEBUG=1 keeps the traceback. Other errors pass."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[:1] == ["serve"]:
            engine, rest = take_engine(args[1:])
            args = ["serve" if engine == "peagle" else "serve-vllm", *rest]
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except InputError as error:
            if os.environ.get("PEAGLE_DEBUG") == "1":
                raise
            typer.echo(f"peagle: error: {error}", err=True)
            raise typer.Exit(USER_ERROR) from error
        except Exception as error:
            # click's class; whether typer brings its own click depends on its version
            if type(error).__name__ == "NoSuchOption" and ctx.invoked_subcommand == "serve":
                error.message += VLLM_HINT  # type: ignore[attr-defined]
            raise


app = typer.Typer(
    name="peagle",
    cls=PeagleGroup,
    help="P-EAGLE and EAGLE-3: train a drafter head for a model, measure it, and see the model run faster with it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data", short_help="Make and inspect training data.")
app.command("train", short_help="Train a head on a target's answers.")(train)
app.command("eval", short_help="Measure how many drafts heads get accepted.")(evaluate)
app.command("inspect", short_help="Describe a head, and say what fits it.")(inspect)
app.command("convert", short_help="Write a head in the native or the speculators layout.")(convert)
app.command("serve", short_help="Serve a model with a head over OpenAI's HTTP API.")(serve)
app.command(
    "serve-vllm",  # reached as `serve --engine vllm`
    hidden=True,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve_vllm)
app.command("bench", short_help="Measure acceptance and throughput over K and concurrency.")(bench)
app.command("demo", short_help="Watch plain, EAGLE-3 and P-EAGLE decoding.")(demo)


def print_version(wanted: bool) -> None:
    if not wanted:
        return
    typer.echo(f"peagle {peagle.__version__}")
    raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the console script and of `python -m peagle`."""
    app()
