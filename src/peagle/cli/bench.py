"""`peagle bench`: acceptance and throughput of P-EAGLE, EAGLE-3 and plain decoding over K and concurrency."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.cli.demo import DEMO_TARGET, choose_heads
from peagle.cli.ending_signals import ends_on_signals
from peagle.data.whole_text import whole_text
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.bench.arms import GivenEndpoint

# A few minutes on two cores.
QUICK: dict[str, Any] = {"workload": ["quick"], "concurrency": "1,4", "k": "2,4", "max_tokens": 40}
USUAL: dict[str, Any] = {"workload": [], "concurrency": "1,2,4,8,16,32,64", "k": "3,5,7", "max_tokens": 512}


def bench(
    target: Annotated[
        str | None,
        typer.Argument(metavar="TARGET", help="Target model: a folder, a Hub id, a GGUF file or wheel:NAME."),
    ] = None,
    p_eagle: Annotated[str | None, typer.Option("--p-eagle", metavar="HEAD", help="P-EAGLE head.")] = None,
    eagle3: Annotated[str | None, typer.Option("--eagle3", metavar="HEAD", help="EAGLE-3 head.")] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A small benchmark with built-in prompts; without TARGET, of the demo's model."),
    ] = False,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            metavar="W",
            help="mt_bench, humaneval, gsm8k (from the Hub; NAME=FILE from a file), speed_bench[:CONFIG[:CATEGORY]], "
            "random:IN:OUT[:N], quick, or a prompt file; may be given several times.",
        ),
    ] = None,
    num_prompts: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="So many conversations of each workload; default: all.")
    ] = None,
    prompts_per_user: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="C users ask only N x C conversations (at least 8), in a fixed shuffled order."
        ),
    ] = None,
    k: Annotated[str | None, typer.Option("--k", metavar="K,K,...", help="Draft tokens a step. Default 3,5,7.")] = None,
    concurrency: Annotated[
        str | None, typer.Option(metavar="C,C,...", help="Users at once. Default 1,2,4,8,16,32,64.")
    ] = None,
    methods: Annotated[
        str | None,
        typer.Option(metavar="M,M,...", help="Of none, eagle3, p-eagle; default: none and those with a head."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="E,E,...",
            help="Of peagle (in this process), peagle-serve and vllm (servers that are started). Default: peagle, or "
            "none where an --endpoint is given.",
        ),
    ] = None,
    endpoint: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A running OpenAI-compatible server: URL[,name=N][,method=M][,k=K][,model=ID][,api=chat|completions]; "
            "may be given several times. Its key is read from OPENAI_API_KEY.",
        ),
    ] = None,
    add: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE",
            help="A result of `vllm bench serve` for the report: FILE[:engine=E][:method=M][:k=K][:workload=W]"
            "[:concurrency=C]; may be given several times.",
        ),
    ] = None,
    server_commands: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="How the endpoints' servers were started, for the report: a JSON object from an endpoint's name, or "
            "its label in the report, to a command line. Goes with --report-only too.",
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(metavar="N", min=1, help="Longest answer. Default 512.")] = None,
    temperature: Annotated[float, typer.Option(metavar="T", min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of sampled answers and random prompts.")] = 0,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Runs of every arm; their spread is shown.")] = 1,
    interleave: Annotated[
        bool, typer.Option("--interleave", help="Repeat the whole sweep instead of each arm at once.")
    ] = False,
    warm_up: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Uncounted prompts before an arm; default: its concurrency.")
    ] = None,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Results, logs and report; an unfinished run there is continued.")
    ] = Path("bench-results"),
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure arms of the results that had failed requests again.")
    ] = False,
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Measure nothing; draw the report of the results in --output.")
    ] = False,
    report: Annotated[
        bool,
        typer.Option("--report/--no-report", help="Draw the report; without, only the table (no matplotlib needed)."),
    ] = True,
    max_model_len: Annotated[int | None, typer.Option(metavar="N", help="Longest request, every engine.")] = None,
    max_num_seqs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Requests that run at once, every engine. Default 64 or C.")
    ] = None,
    speculative_args: Annotated[
        str,
        typer.Option(
            metavar="JSON",
            help="Further keys of the speculative config by method, such as those of synthetic acceptance: "
            "'{\"p-eagle\": {...}}'.",
        ),
    ] = "{}",
    engine_args: Annotated[
        str, typer.Option(metavar="JSON", help="Further settings of the engine in this process (EngineConfig's names).")
    ] = "{}",
    serve_args: Annotated[str, typer.Option(metavar="ARGS", help="Further flags of peagle serve, quoted.")] = "",
    vllm_args: Annotated[str, typer.Option(metavar="ARGS", help="Further flags of vllm serve, quoted.")] = "",
    extra_body: Annotated[str, typer.Option(metavar="JSON", help="Added to every request to a server.")] = "{}",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; default: cuda if there.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads of this project's engine.")
    ] = None,
    stall_timeout: Annotated[
        float, typer.Option(metavar="S", min=0.1, help="A request that is silent so long has failed, seconds.")
    ] = 120.0,
    request_timeout: Annotated[float, typer.Option(metavar="S", min=0.1, help="Longest request, seconds.")] = 1800.0,
    start_timeout: Annotated[float, typer.Option(metavar="S", min=1, help="Longest start of a server.")] = 900.0,
    detailed: Annotated[
        bool, typer.Option("--detailed", help="Keep texts, token ids and all gaps between tokens in the results.")
    ] = False,
) -> None:
    """Measure a model with its heads: acceptance length and throughput over K and concurrency, and draw a report.

    Every arm asks the same prompts in the same order, C users at a time, each waiting for its answer. Servers are
    started and stopped here, with their prefix caches off. Greedy answers are compared with plain decoding's. What is
    measured goes into FOLDER/results.jsonl at once; the same command continues there. Definitions: docs/bench.md.
    """
    from peagle.bench.report import check_packages, terminal_text, write_report
    from peagle.bench.results_file import drop_unfinished_line, read_results
    from peagle.bench.server_commands import read_server_commands
    from peagle.bench.vllm_json import read_vllm_results

    if report:
        check_packages()
    added = read_vllm_results(add or ())
    if report_only:
        results = read_results(output / "results.jsonl")
        if server_commands is not None:
            drop_unfinished_line(results.path)
            known = [name for arm in results.arms.values() for name in (arm["engine"], arm["label"])]
            results.add_server_commands(read_server_commands(server_commands, known))
        typer.echo(write_report(results, added, output))
        return

    from peagle.bench.arms import ENGINES, METHODS, parse_endpoint, parse_names, parse_numbers, plain_first, plan_setups
    from peagle.bench.backends import RunSettings
    from peagle.bench.bench_run import Plan, check_plan, not_measured, run_plan
    from peagle.bench.load_client import Sampling
    from peagle.bench.sweep import SweepOptions
    from peagle.bench.terminal_screen import TerminalScreen
    from peagle.bench.workloads import load_workloads
    from peagle.target.text import read_target_text

    given = plain_first([parse_endpoint(text) for text in endpoint or ()])
    check_names(given)
    engines = parse_names(engine, "--engine", ENGINES) if engine else [] if given else ["peagle"]
    if not engines:
        for flag, value in {
            "--p-eagle": p_eagle, "--eagle3": eagle3, "--k": k, "--methods": methods, "--engine-args": engine_args,
            "--vllm-args": vllm_args, "--serve-args": serve_args, "--speculative-args": speculative_args,
        }.items():  # fmt: skip
            refuse_without_engine(flag, value)
    commands: dict[str, str] = {}
    if server_commands is not None:
        known = [name for one in given for name in (one.name, one.setup.label)]
        commands = read_server_commands(server_commands, known)
    if target is None and quick and not given:
        target = DEMO_TARGET
    if target is None and (engines or any(one.api == "completions" for one in given)):
        raise InputError("TARGET: missing, expected a model (only endpoints with api=chat do without)")
    heads = find_heads(target, p_eagle, eagle3, quick) if engines else {}
    defaults = QUICK if quick else USUAL
    specs = workload or defaults["workload"]
    if not specs:
        raise InputError("--workload: missing, expected at least one (mt_bench, humaneval, a file, ...) or --quick")
    ks = parse_numbers(k or defaults["k"], "--k")
    users = parse_numbers(concurrency or defaults["concurrency"], "--concurrency")
    chosen = parse_names(methods, "--methods", METHODS) if methods else ["none", *heads]
    for method in chosen:
        if method != "none" and method not in heads and engines:
            raise InputError(f"--methods: {method} needs a head, expected --{method} HEAD")
    vllm_flags, serve_flags = shlex.split(vllm_args), shlex.split(serve_args)
    if threads is not None:
        serve_flags += ["--threads", str(threads)]
    longest = max_tokens or defaults["max_tokens"]
    settings = RunSettings(
        target=target or "",
        heads={method: head for method, head in heads.items() if method in chosen},
        max_tokens=longest,
        sampling=Sampling(temperature, seed),
        dtype=dtype,
        device=device,
        max_num_seqs=max_num_seqs or max(64, *users),
        max_model_len=max_model_len,
        speculative_args=read_by_method("--speculative-args", speculative_args),
        engine_args=read_object("--engine-args", engine_args),
        serve_args=serve_flags,
        vllm_args=vllm_flags,
        extra_body=read_object("--extra-body", extra_body),
        stall_timeout=stall_timeout,
        request_timeout=request_timeout,
        start_timeout=start_timeout,
        api_key=os.environ.get("OPENAI_API_KEY"),
    )
    quiet_transformers(threads)
    text = read_target_text(target) if target is not None else None
    plan = Plan(
        setups=[*plan_setups(engines, chosen, ks), *(one.setup for one in given)],
        workloads=[w.shuffled() if prompts_per_user else w for w in load_workloads(specs, num_prompts, text, seed)],
        concurrencies=users,
        repeats=repeats,
        interleave=interleave,
        settings=settings,
        options=SweepOptions(longest, warm_up, prompts_per_user, detailed, check=temperature == 0),
        given=given,
        output=output,
        command=shlex.join(["peagle", *sys.argv[1:]]),
        retry_failed=retry_failed,
        server_commands=commands,
    )
    for note in check_plan(plan, text):
        typer.echo(f"note: {note}", err=True)
    screen = TerminalScreen()
    with ends_on_signals():
        results = run_plan(plan, text, screen)
    typer.echo(write_report(results, added, output) if report else terminal_text(results, added))
    failed = sum(int(arm["failed"]) for arm in results.arms.values())
    missing, failed_starts = not_measured(plan, results), results.failed_starts
    if failed_starts or missing or failed:
        typer.echo(
            f"peagle: {len(failed_starts)} setups did not start and {failed} requests failed; {len(missing)} of "
            f"{len(plan.arms)} arms were not measured; the report says which",
            err=True,
        )
        raise typer.Exit(1)


def refuse_without_engine(flag: str, value: str | None) -> None:
    """Endpoints alone are measured: what only engines take would change nothing."""
    if value not in (None, "", "{}"):
        raise InputError(
            f"{flag}: only endpoints are measured, and it is for engines that are loaded or started here; leave it "
            "out, or name an --engine"
        )


def find_heads(target: str | None, p_eagle: str | None, eagle3: str | None, quick: bool) -> dict[str, str]:
    """Heads by method, EAGLE-3's first; --quick takes the bundled ones for the demo's model."""
    if quick and target == DEMO_TARGET:
        eagle3, p_eagle = choose_heads(DEMO_TARGET, p_eagle, eagle3)
    found = {"eagle3": eagle3, "p-eagle": p_eagle}
    return {method: head for method, head in found.items() if head is not None}


def check_names(given: list[GivenEndpoint]) -> None:
    """Two endpoints may share a name only if method or K tell them apart."""
    setups = [one.setup for one in given]
    for setup in setups:
        if setups.count(setup) > 1:
            raise InputError(f"--endpoint: two are {setup.label}, expected different name=, method= or k=")


def read_object(flag: str, text: str) -> dict[str, Any]:
    """A JSON object from a flag."""
    try:
        value = json.loads(text)
        whole_text(json.dumps(value, ensure_ascii=False), flag)
    except json.JSONDecodeError as error:
        raise InputError(f"{flag}: {error}, expected a JSON object")
    if not isinstance(value, dict):
        raise InputError(f"{flag}: got {text!r}, expected a JSON object")
    return value


def read_by_method(flag: str, text: str) -> dict[str, dict[str, Any]]:
    """A JSON object of objects, by the name of a method with a head."""
    value = read_object(flag, text)
    for method, further in value.items():
        if method not in ("eagle3", "p-eagle") or not isinstance(further, dict):
            raise InputError(f'{flag}: got {text!r}, expected {{"eagle3": {{...}}, "p-eagle": {{...}}}} or one of them')
    return value


def quiet_transformers(threads: int | None) -> None:
    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    if threads is not None:
        torch.set_num_threads(threads)
    set_verbosity_error()
    disable_progress_bar()
