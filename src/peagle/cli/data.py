"""`peagle data`: training data for a head, written by the target that the head is for."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.errors import InputError

data_app = typer.Typer(
    name="data",
    help="Make and inspect training data: prompts, and the answers that the target itself gives to them.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
)

PROMPTS_HELP = (
    "Prompts, as FILE[:option=value]... or hub:OWNER/NAME[:SPLIT[:FIELD]][:option=value]...; may be repeated. "
    "FILE is .jsonl, .json (either also .gz) or .parquet; the form is recognised from its fields: instruction with "
    "input or instances, turns, messages, conversations, question, prompt, text. Only what users say is taken. "
    "Options: limit=N (a fixed random choice of N), template=TEXT with {prompt} in it, or a built-in name "
    "(complete_code, complete_python, write_python, translate_python, explain_code, step_by_step, solve) or a file; "
    "transform=python_stub (mbxp rows become Python function stubs); field=F (take this field); where=FIELD=VALUE; "
    "name=S (the source's name in statistics); config=C (of a Hub data set)."
)
SELF_HELP = (
    "Let the target write N prompts itself, as N[:name=NAME][:temperature=T][:openings=WORDS|WORDS|...]; may be "
    "repeated. It is fed its chat template's opening of a user turn, and the opening words if any, and writes the rest "
    "of the user's turn. openings=FILE reads one opening a line; \\n in it means a new line."
)
EXCLUDE_HELP = (
    "Evaluation prompts, by the syntax of --prompts; may be repeated. A prompt, read or self-written, that is too "
    "close to one of them is dropped and counted."
)


@data_app.command()
def generate(
    target: Annotated[str, typer.Argument(help="The target: a local folder, a Hub id or a GGUF file.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the answers. Run again to go on.")],
    prompts: Annotated[list[str] | None, typer.Option("--prompts", help=PROMPTS_HELP)] = None,
    self_prompts: Annotated[list[str] | None, typer.Option("--self-prompts", help=SELF_HELP)] = None,
    opening: Annotated[
        list[str] | None,
        typer.Option(help="Opening words for --self-prompts that name none; may be repeated, used in turn."),
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", help=EXCLUDE_HELP)] = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            help="Temperature of the answers, as T or T=SHARE; repeat it to split the prompts, e.g. --temperature 0 "
            "--temperature 0.8. Use what you will serve with. Default: 0."
        ),
    ] = None,
    every_temperature: Annotated[
        bool, typer.Option("--every-temperature", help="Answer every prompt at every temperature, not at one of them.")
    ] = False,
    top_p: Annotated[float, typer.Option(help="Nucleus sampling of the answers.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample answers from the k likeliest tokens; 0: from all.")] = 0,
    max_tokens: Annotated[
        int, typer.Option(help="Longest answer in tokens. A longer one is cut there and kept.")
    ] = 2048,
    loop_limit: Annotated[
        int,
        typer.Option(help="End an answer whose last so many tokens repeat themselves, and keep it so far; 0: never."),
    ] = 256,
    turns: Annotated[
        int, typer.Option(help="User turns a conversation. The target writes those that a prompt does not bring.")
    ] = 1,
    turns_share: Annotated[
        float, typer.Option(help="Share of the conversations, 0 to 1, that go on to --turns.")
    ] = 1.0,
    self_temperature: Annotated[float, typer.Option(help="Temperature of self-written user turns.")] = 1.0,
    self_top_p: Annotated[float, typer.Option(help="Nucleus sampling of self-written user turns.")] = 0.95,
    self_max_tokens: Annotated[
        int, typer.Option(help="Longest self-written user turn; a longer one is dropped.")
    ] = 512,
    shard: Annotated[
        str,
        typer.Option(help="I/N: this process takes part I of N of the prompts. All parts write into the same folder."),
    ] = "1/1",
    seed: Annotated[int, typer.Option(help="Seed of every random choice.")] = 0,
    chat_template_kwargs: Annotated[
        str, typer.Option(help='JSON for the chat template, e.g. {"enable_thinking": false}.')
    ] = "{}",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    max_model_len: Annotated[
        int | None, typer.Option(help="Longest sequence, prompt and answers together; default: the target's.")
    ] = None,
    max_num_seqs: Annotated[int | None, typer.Option(help="Requests in one batch; default: the engine's.")] = None,
    window: Annotated[
        int, typer.Option(help="Requests queued in the engine; keep it a few times --max-num-seqs.")
    ] = 4096,
    num_scheduler_steps: Annotated[
        int | None, typer.Option(help="Decoding steps between two looks of the host; default: 16 on a GPU, else 1.")
    ] = None,
    rows_per_shard: Annotated[
        int, typer.Option(help="Conversations a shard file. A shard is written every five minutes in any case.")
    ] = 4096,
) -> None:
    """Write prompts' answers by TARGET into a folder of Parquet shards.

    Token ids are kept exactly as generated, with a mask of which of them are answers. A stopped run goes on where it
    was when the same command is given again. Several processes (--shard) may fill one folder.

    Example: peagle data generate HuggingFaceTB/SmolLM2-135M-Instruct -o answers --prompts gsm8k.jsonl:limit=2000
    --self-prompts 10000 --exclude mt_bench.jsonl --temperature 0 --temperature 0.8
    """
    from peagle.data.answers import AnswerSettings, parse_temperature
    from peagle.data.generate import GenerateJob, GeneratingTarget, parse_part
    from peagle.data.generate import generate as run
    from peagle.data.self_prompts import SelfPromptSettings, parse_group

    if not 0 <= turns_share <= 1:
        raise InputError(f"--turns-share {turns_share}: expected 0 to 1")
    for name, value in (
        ("turns", turns),
        ("max-tokens", max_tokens),
        ("window", window),
        ("rows-per-shard", rows_per_shard),
    ):
        if value < 1:
            raise InputError(f"--{name} {value}: expected a positive number")
    job = GenerateJob(
        output=output,
        prompts=tuple(prompts or ()),
        self_prompts=tuple(parse_group(spec, opening or ()) for spec in self_prompts or ()),
        exclude=tuple(exclude or ()),
        part=parse_part(shard),
        answers=AnswerSettings(
            temperatures=tuple(parse_temperature(text) for text in temperature or ("0",)),
            every=every_temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=max_tokens,
            loop_limit=loop_limit,
            turns=turns,
            turns_share=turns_share,
            seed=seed,
        ),
        turns=SelfPromptSettings(temperature=self_temperature, top_p=self_top_p, max_tokens=self_max_tokens, seed=seed),
        rows_per_shard=rows_per_shard,
        template_kwargs=_json_object(chat_template_kwargs),
    )

    def open_target() -> GeneratingTarget:
        import torch

        from peagle.engine.llm import LLM

        on_gpu = (device or ("cuda" if torch.cuda.is_available() else "cpu")) == "cuda"
        limits: dict[str, Any] = {
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "num_scheduler_steps": num_scheduler_steps or (16 if on_gpu else 1),
        }
        llm = LLM(target, dtype=dtype, device=device, **{key: value for key, value in limits.items() if value})
        return GeneratingTarget(
            engine=llm.engine,
            tokenizer=llm.get_tokenizer(),
            name=target,
            vocab_size=llm.target.vocab_size,
            max_model_len=llm.engine.max_model_len,
            end_ids=llm.target.eos_token_ids,
            window=window,
        )

    run(job, open_target, typer.echo)


@data_app.command()
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


@data_app.command("hidden-states")
def hidden_states(
    target: Annotated[str, typer.Argument(help="The target: a local folder, a Hub id or a GGUF file.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders of answers; several count as one data set.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the states. Run again to go on.")],
    stored: Annotated[
        str, typer.Option("--store", help="bf16, or fp8: half of the size, e4m3 with a scale a row.")
    ] = "bf16",
    aux_layer_ids: Annotated[
        str | None, typer.Option(help="Target layers that the head will read, such as 2,15,27 [2,n/2,n-3].")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut longer documents; train with --pack-length up to it.")
    ] = None,
    shard_gib: Annotated[float, typer.Option(help="Size of a shard file.")] = 2.0,
    dtype: Annotated[str, typer.Option(help="The target's: auto (its own on a GPU), float32 or bfloat16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    engine: Annotated[str, typer.Option(help="peagle (the target in this process), or vllm.")] = "peagle",
    vllm_python: Annotated[
        str, typer.Option(help="The Python of the environment that vLLM is installed in.")
    ] = sys.executable,
    vllm_args: Annotated[str, typer.Option(help='JSON for vLLM, e.g. {"tensor_parallel_size": 8}.')] = "{}",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much would be written, and stop.")] = False,
) -> None:
    """Write what TARGET computes of every document, for `peagle train --hidden-states`.

    A run of many passes over the data then reads files instead of running the target. The size is said, and the free
    disk looked at, before anything is written; shards carry checksums; a stopped run goes on when started again.
    """
    from peagle.cli.train import parse_layer_ids
    from peagle.data.dataset import open_dataset
    from peagle.target.loading import load_target
    from peagle.training.write_states import Encode, plan_states, target_encoder, write_states
    from peagle.vllm.states import VllmStates

    if stored not in ("bf16", "fp8"):
        raise InputError(f"--store {stored}: expected bf16 or fp8")
    if shard_gib <= 0 or (max_length is not None and max_length < 3):
        raise InputError("--shard-gib, --max-length: expected a positive size, and 3 tokens or more")
    if engine not in ("peagle", "vllm"):
        raise InputError(f"--engine {engine}: expected peagle or vllm")
    by_vllm = engine == "vllm"
    if by_vllm and dtype == "auto":
        dtype = "bfloat16"
    vllm = VllmStates(vllm_python, dtype, _json_object(vllm_args, "--vllm-args"))
    computed_in = f"{dtype} by vLLM {vllm.version()}" if by_vllm else None
    answers = open_dataset(folders)
    loaded = load_target(target, dtype, "cpu" if by_vllm else device, layers="none" if by_vllm else "device")
    if loaded.tokenizer is not None:
        answers.check_target(loaded.tokenizer, loaded.vocab_size)
    shard_bytes = int(shard_gib * 2**30)
    plan = plan_states(loaded, answers, stored, parse_layer_ids(aux_layer_ids), max_length, shard_bytes, computed_in)  # type: ignore[arg-type]
    with ExitStack() as stack:

        def encoder() -> Encode:
            if by_vllm:
                return stack.enter_context(vllm.encoder(loaded, plan.aux_layer_ids, plan.max_length))
            return target_encoder(loaded, plan.aux_layer_ids)

        written = write_states(plan, answers, encoder, output, typer.echo, dry_run)
    if not dry_run:
        typer.echo(f"{output}: {written} shards written, {len(plan.shards)} in all")


@data_app.command()
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


@data_app.command()
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


def _json_object(text: str, flag: str = "--chat-template-kwargs") -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InputError(f"{flag}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{flag}: expected a JSON object, got {text!r}")
    return value
