"""`peagle data generate`: prompts in, the target's own answers out."""

import os
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.cli.ending_signals import ends_on_signals
from peagle.cli.json_flag import json_object
from peagle.errors import InputError

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
    endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Let this OpenAI-compatible server of TARGET answer; no weights are loaded here. Its key is read from "
            "OPENAI_API_KEY.",
        ),
    ] = None,
    endpoint_model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What the endpoint calls TARGET; default: the first that it lists."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(metavar="N", help="Requests at the endpoint at once. Default 64.")
    ] = None,
    max_retries: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="How often a request to the endpoint is tried again, after 1, 2, 4, ... seconds, when it stalls, the "
            "connection fails or the server answers 429 or 5xx. Default 6.",
        ),
    ] = None,
    stall_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="S", min=0.1, help="An endpoint's request that is silent so long has failed, seconds. Default 300."
        ),
    ] = None,
    retry_refused: Annotated[
        bool, typer.Option("--retry-refused", help="Ask the endpoint again what it refused in an earlier run.")
    ] = False,
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
        int | None,
        typer.Option(help="Decoding steps between two looks of the host; default: 16 on a GPU, else 1."),
    ] = None,
    rows_per_shard: Annotated[
        int, typer.Option(help="Conversations a shard file. A shard is written every five minutes in any case.")
    ] = 4096,
) -> None:
    """Write prompts' answers by TARGET into a folder of Parquet shards.

    Token ids are kept exactly as generated, with a mask of which of them are answers. A run that is stopped (Ctrl-C,
    SIGTERM) writes what it has, and goes on where it was when the same command is given again. Several processes
    (--shard) may fill one folder. With --endpoint a server answers, and what it refuses is listed in refused.jsonl.

    Example: peagle data generate HuggingFaceTB/SmolLM2-135M-Instruct -o answers --prompts gsm8k.jsonl:limit=2000
    --self-prompts 10000 --exclude mt_bench.jsonl --temperature 0 --temperature 0.8
    """
    from peagle.data.answers import AnswerSettings, parse_temperature
    from peagle.data.generate import GeneratingTarget
    from peagle.data.generate import generate as run
    from peagle.data.job import GenerateJob, parse_part
    from peagle.data.self_prompts import SelfPromptSettings, parse_group

    if not 0 <= turns_share <= 1:
        raise InputError(f"--turns-share {turns_share}: expected 0 to 1")
    for name, value in (
        ("turns", turns),
        ("max-tokens", max_tokens),
        ("window", window),
        ("rows-per-shard", rows_per_shard),
        ("max-model-len", max_model_len),
        ("max-num-seqs", max_num_seqs),
        ("num-scheduler-steps", num_scheduler_steps),
        ("concurrency", concurrency),
    ):
        if value is not None and value < 1:
            raise InputError(f"--{name} {value}: expected a positive number")
    if max_retries is not None and max_retries < 0:
        raise InputError(f"--max-retries {max_retries}: expected 0 or more")
    refuse_useless(
        endpoint is not None,
        at_endpoint={
            "endpoint-model": endpoint_model,
            "concurrency": concurrency,
            "max-retries": max_retries,
            "stall-timeout": stall_timeout,
            "retry-refused": retry_refused or None,
        },
        in_process={
            "dtype": None if dtype == "auto" else dtype,
            "device": device,
            "max-num-seqs": max_num_seqs,
            "window": None if window == 4096 else window,
            "num-scheduler-steps": num_scheduler_steps,
        },
    )
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
        template_kwargs=json_object(chat_template_kwargs, "--chat-template-kwargs"),
        retry_refused=retry_refused,
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
        given = {key: value for key, value in limits.items() if value is not None}
        llm = LLM(target, dtype=dtype, device=device, **given)
        return GeneratingTarget(
            engine=llm.engine,
            tokenizer=llm.get_tokenizer(),
            name=target,
            vocab_size=llm.target.vocab_size,
            max_model_len=llm.engine.max_model_len,
            end_ids=llm.target.eos_token_ids,
            window=window,
        )

    if endpoint is None:
        with ends_on_signals():
            run(job, open_target, typer.echo)
        return
    try:
        from peagle.data.endpoint_retries import EndpointSettings
        from peagle.data.endpoint_target import open_endpoint
    except ImportError as error:
        raise InputError(f"--endpoint needs httpx: pip install 'peagle[train]' ({error})") from error
    given_settings = {"max_retries": max_retries, "stall_timeout": stall_timeout}
    settings = EndpointSettings(
        endpoint,
        endpoint_model or "",
        os.environ.get("OPENAI_API_KEY"),
        **{key: value for key, value in given_settings.items() if value is not None},  # type: ignore[arg-type]
    )

    with ends_on_signals(), ExitStack() as stack:

        def ask_endpoint() -> GeneratingTarget:
            generating, engine = open_endpoint(job, target, settings, concurrency or 64, max_model_len, typer.echo)
            stack.enter_context(closing(engine))
            stack.callback(lambda: typer.echo(engine.line()) if engine.line() else None)
            return generating

        run(job, ask_endpoint, typer.echo)


def refuse_useless(endpoint: bool, at_endpoint: dict[str, Any], in_process: dict[str, Any]) -> None:
    """Raise InputError for a given option that says nothing with, or without, an endpoint."""
    for name, value in (in_process if endpoint else at_endpoint).items():
        if value is not None:
            where = "the engine in this process, not for an --endpoint" if endpoint else "an --endpoint"
            raise InputError(f"--{name}: only for {where}")
