"""`peagle data`: training data for a head, written by the target that the head is for."""

import json
from pathlib import Path
from typing import Annotated

import typer

from peagle.cli.data_generate import generate
from peagle.cli.data_hidden_states import hidden_states
from peagle.errors import InputError

data_app = typer.Typer(
    name="data",
    help="Make and inspect training data: prompts, and the answers that the target itself gives to them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)


def stats(
    folders: Annotated[list[Path], typer.Argument(help="Folders of answers; several count as one data set.")],
    plot: Annotated[Path | None, typer.Option(help="Draw the length distribution into this PNG file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print how long prompts and answers are, by source, in tokens: minimum, median, mean, P90, P99, maximum."""
    from peagle.data.dataset import open_dataset
    from peagle.data.lengths import format_table, length_table, plot_lengths, table_as_json

    dataset = open_dataset(folders)
    table = length_table(dataset)
    if as_json:
        typer.echo(json.dumps({"fingerprint": dataset.fingerprint, "sources": table_as_json(table)}, indent=2))
    else:
        typer.echo(f"{dataset.metadata['target']['name']}, fingerprint {dataset.fingerprint[:16]}")
        typer.echo(format_table(table))
    if plot is not None:
        title = f"{len(dataset):,} conversations with {Path(dataset.metadata['target']['name']).name}"
        plot_lengths(dataset.lengths, plot, title)


def check(
    folders: Annotated[list[Path], typer.Argument(help="Folders of answers.")],
    exclude: Annotated[list[str], typer.Option("--exclude", help="Evaluation prompts; may be repeated.")],
    target: Annotated[
        str | None, typer.Option(help="Where to take the tokenizer from; default: the target named in the folder.")
    ] = None,
) -> None:
    """Verify every shard, and that no user turn is too close to an evaluation prompt."""
    from transformers import AutoTokenizer

    from peagle.data.chat_format import ChatFormat
    from peagle.data.check import check_dataset
    from peagle.data.dataset import open_dataset
    from peagle.target.loading import resolve_model

    dataset = open_dataset(folders)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(target or dataset.metadata["target"]["name"]))
    dataset.check_target(tokenizer)
    looked_at = check_dataset(dataset, exclude, ChatFormat(tokenizer))
    typer.echo(f"{len(dataset)} examples in {len(dataset.shards)} shards, {looked_at} user turns: none too close")


def merge(
    inputs: Annotated[list[Path], typer.Argument(help="Folders of answers by the same target.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder.")],
    temperature: Annotated[
        list[float] | None, typer.Option(help="Keep only answers at this temperature; may be repeated.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Stop before there are more tokens than this, prompts included.")
    ] = None,
) -> None:
    """Put several folders into one; a prompt answered twice at one temperature is taken once."""
    from peagle.data.merge import merge_datasets

    count = merge_datasets(inputs, output, temperatures=temperature, max_tokens=max_tokens)
    typer.echo(f"{output}: {count} examples")


def join(
    inputs: Annotated[list[Path], typer.Argument(help="Folders of answers by the same target.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder.")],
    tokens: Annotated[int, typer.Option(help="Longest joined conversation.")],
    share: Annotated[float, typer.Option(help="Share of all tokens to be in joined conversations.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the choice of conversations.")] = 0,
) -> None:
    """Make long conversations of short ones, for heads that are to draft in long contexts."""
    from peagle.data.join import join_conversations

    count, joined = join_conversations(inputs, output, tokens, share, seed)
    typer.echo(f"{output}: {count} examples, {joined} of them joined")


def draft_vocabulary(
    head: Annotated[Path, typer.Argument(help="Folder of a head that drafts from the whole vocabulary.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders of answers by the head's target.")],
    target: Annotated[
        str | None,
        typer.Option(help="Where to take the tokenizer of the head's target from; default: the target it names."),
    ] = None,
) -> None:
    """List the frequent tokens of answers in a head's folder, as `peagle train` does: a CPU drafts from them."""
    from peagle.data.dataset import open_dataset
    from peagle.data.head_target import check_head_target
    from peagle.drafter.draft_vocabulary import COVERAGE, FILE, write_draft_vocabulary
    from peagle.drafter.loading import read_config

    config, dataset = read_config(head), open_dataset(folders)
    if config.reduced_vocab:
        raise InputError(
            f"HEAD: {head} has {config.draft_vocab_size} draft tokens of its own, expected a whole vocabulary"
        )
    if (size := dataset.metadata["target"]["vocab_size"]) != config.vocab_size:
        raise InputError(f"FOLDERS: answers of a vocabulary of {size} tokens, expected the head's {config.vocab_size}")
    check_head_target(head, dataset, target)
    listed = write_draft_vocabulary(head, dataset.token_counts(config.vocab_size))
    typer.echo(f"{head / FILE}: {listed} of {config.vocab_size} tokens, {COVERAGE:.0%} of the answers")


data_app.command()(generate)
data_app.command()(stats)
data_app.command("hidden-states")(hidden_states)
data_app.command()(check)
data_app.command()(merge)
data_app.command()(join)
data_app.command("draft-vocabulary")(draft_vocabulary)
