"""`peagle serve`: a model with its head behind OpenAI's API."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer

from peagle.cli.json_flag import json_strings
from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.config.engine import EngineConfig
    from peagle.config.speculative import SpeculativeConfig
    from peagle.engine.engine import Engine


def unused(where: str, **given: object) -> list[str]:
    """A warning for each flag that was given (is not None), and that changes nothing there."""
    flags = (f"--{name.replace('_', '-')}" for name, value in given.items() if value is not None)
    return [f"{flag} changes nothing {where}" for flag in flags]


class Collected(logging.Handler):
    """Warnings of the loading engine, for the start-up text."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def serve(
    target: Annotated[
        str, typer.Argument(metavar="TARGET", help="Target model: a folder, a Hub id, a GGUF file or wheel:NAME.")
    ],
    speculative_config: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help='The head, as for vLLM: \'{"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 7, '
            '"parallel_drafting": true}\'. Without it the target decodes plainly.',
        ),
    ] = None,
    host: Annotated[
        str, typer.Option("--host", metavar="HOST", help="Address to listen on; 0.0.0.0 for all.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", metavar="PORT", min=0, max=65535, help="0 for any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="Key that clients must send; may be given several times. Default: PEAGLE_API_KEY or VLLM_API_KEY in "
            "the environment, if there.",
        ),
    ] = None,
    allowed_origins: Annotated[
        str,
        typer.Option(metavar="JSON", help="Web pages that may ask from a browser: '[\"*\"]' for all. Default: none."),
    ] = "[]",
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="What clients call the model; may be given several times. Default: TARGET."),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(metavar="N", help="Longest request in tokens, prompt and answer.")
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(metavar="N", help="Requests that run at once.")] = 256,
    max_num_batched_tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens a step.")] = None,
    max_queue: Annotated[
        int, typer.Option(metavar="N", min=0, help="Requests that may wait beyond those; more are refused with 429.")
    ] = 1024,
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="auto, float32, bfloat16 or float16.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option("--device", metavar="DEVICE", help="cpu or cuda; default: cuda where there is one.")
    ] = None,
    block_size: Annotated[int, typer.Option(metavar="N", help="Tokens a KV block.")] = 16,
    num_kv_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="KV blocks; default: what the memory below holds.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float | None, typer.Option(metavar="F", help="Part of the GPU's memory to use, weights included. Default: 0.9.")
    ] = None,
    cpu_kv_cache_gib: Annotated[
        float | None, typer.Option(metavar="GIB", help="KV cache on a CPU. Default: 1.")
    ] = None,
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="auto: the model's; fp8 (fp8_e4m3): half the memory of 16 bits.")
    ] = "auto",
    enable_prefix_caching: Annotated[
        bool,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse what was computed of a prompt's beginning.",
        ),
    ] = True,
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Compute long prompts in several steps."
        ),
    ] = True,
    async_scheduling: Annotated[
        bool | None,
        typer.Option(
            "--async-scheduling/--no-async-scheduling",
            help="GPU: start a step before the host has read the one before it. Default: yes.",
        ),
    ] = None,
    max_cudagraph_capture_size: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=0, help="GPU: most rows (K + 1 a request) of a step run as a CUDA graph; 0: none."
        ),
    ] = None,
    enforce_eager: Annotated[
        bool | None, typer.Option("--enforce-eager/--no-enforce-eager", help="GPU: no CUDA graphs, for debugging.")
    ] = None,
    dynamic_speculation: Annotated[
        bool | None,
        typer.Option(
            "--dynamic-speculation/--no-dynamic-speculation",
            help="CPU: choose by load how many of num_speculative_tokens drafts to make, none if that is faster. "
            "Default: yes, but for a table of num_speculative_tokens_per_batch_size.",
        ),
    ] = None,
    max_logprobs: Annotated[
        int, typer.Option(metavar="N", min=-1, help="Most logprobs a token that a request may ask for; -1: no limit.")
    ] = 20,
    stream_interval: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens a streamed chunk; the first and last come at once.")
    ] = 1,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of requests that bring none.")] = 0,
    threads: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="CPU threads; default: PyTorch's choice.")
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="How long requests in flight may go on after SIGTERM.")
    ] = 60.0,
    access_log: Annotated[bool, typer.Option(help="Log a line a request.")] = False,
) -> None:
    """Serve a model over OpenAI's HTTP API, in place of `vllm serve` on one machine.

    With --engine vllm the same command checks the head and starts stock vLLM instead; vLLM's own flags pass through,
    and --dry-run prints the command only.
    """
    from peagle.config.engine import EngineConfig
    from peagle.config.speculative import SpeculativeConfig

    origins = json_strings(allowed_origins, "--allowed-origins")
    keys = api_keys(api_key, os.environ)
    speculative = None if speculative_config is None else SpeculativeConfig.parse(speculative_config)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        gpu_memory_utilization=0.9 if gpu_memory_utilization is None else gpu_memory_utilization,
        cpu_kv_cache_gib=1.0 if cpu_kv_cache_gib is None else cpu_kv_cache_gib,
        kv_cache_dtype="fp8" if kv_cache_dtype == "fp8_e4m3" else kv_cache_dtype,  # type: ignore[arg-type]
        enable_chunked_prefill=enable_chunked_prefill,
        enable_prefix_caching=enable_prefix_caching,
        async_scheduling=async_scheduling is not False,
        enforce_eager=bool(enforce_eager) or max_cudagraph_capture_size == 0,
        max_cudagraph_capture_size=max_cudagraph_capture_size or None,
        max_logprobs=max_logprobs,
        seed=seed,
        dynamic_speculation=dynamic_speculation,
    )
    try:
        from peagle.server.run import banner, bind, end_on_signals, make_server
    except ImportError as error:
        raise InputError(f"serve needs the extra packages of peagle[server] ({error})") from error
    from peagle.server.app import AppSettings, create_app
    from peagle.server.engine_loop import EngineLoop

    sock = bind(host, port)
    # On a thread that ends: OpenMP keeps a pool of workers for every thread that ever ran products, and beside a second
    # pool it lets them sleep between two products (1.47 times the time on two cores). The engine has its own.
    with ThreadPoolExecutor(1) as loader:
        engine, warnings = loader.submit(load, target, speculative, dtype, device, config, threads).result()
    if engine.target.device.type == "cpu":
        warnings += unused(
            "on a CPU",
            async_scheduling=async_scheduling,
            max_cudagraph_capture_size=max_cudagraph_capture_size,
            enforce_eager=enforce_eager,
            gpu_memory_utilization=gpu_memory_utilization,
        )
        sizes = {"cpu_kv_cache_gib": cpu_kv_cache_gib}
    else:
        warnings += unused("on a GPU", cpu_kv_cache_gib=cpu_kv_cache_gib)
        sizes = {"gpu_memory_utilization": gpu_memory_utilization}
    if num_kv_blocks is not None:
        warnings += unused("beside --num-kv-blocks", **sizes)
    settings = AppSettings(tuple(served_model_name or [target]), keys, stream_interval, origins)
    engine_loop = EngineLoop(engine, settings.model_names[0], max_queue)
    server = make_server(create_app(engine_loop, settings), engine_loop, drain_timeout, access_log)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{sock.getsockname()[1]}"
    end_on_signals(server)
    sock.listen()  # from here on clients wait instead of being refused
    head_name = None if speculative is None else speculative.model
    typer.echo(banner(engine, settings.model_names, url, warnings, head_name))
    # What is there now stays to the end. Each full collection would walk all of it, libraries and model, and a large
    # request's objects call for several of them while everybody waits.
    gc.collect()
    gc.freeze()
    server.run(sockets=[sock])


def api_keys(given: Sequence[str] | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The keys given, or else the one in the environment, as it is. Raises InputError for one that no client can send
    or that lets in who sends none, as that of a variable that is set to nothing."""
    found = [("--api-key", key) for key in given or ()]
    if not found:
        found = [(name, environ[name]) for name in ("PEAGLE_API_KEY", "VLLM_API_KEY") if name in environ][:1]
    for name, key in found:
        if not key or key != key.strip():
            raise InputError(
                f"{name}: got a key that is empty or has spaces around it, expected one that clients can send"
            )
    return tuple(key for _, key in found)


def load(
    target: str,
    speculative: SpeculativeConfig | None,
    dtype: str,
    device: str | None,
    config: EngineConfig,
    threads: int | None,
) -> tuple[Engine, list[str]]:
    """The engine, and what it warned of while it was made."""
    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from peagle.engine.loading import load_engine
    from peagle.engine.memory import is_out_of_memory

    if threads is not None:
        torch.set_num_threads(threads)
    set_verbosity_error()
    disable_progress_bar()
    logger, collected = logging.getLogger("peagle"), Collected()
    logger.addHandler(collected)
    try:
        engine = load_engine(target, speculative, dtype, device, config)
        engine.capture()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            "out of memory while loading; lower --gpu-memory-utilization (on a CPU --cpu-kv-cache-gib), "
            "--max-num-seqs, --max-num-batched-tokens, --max-cudagraph-capture-size or --max-model-len "
            f"({error})"
        ) from error
    finally:
        logger.removeHandler(collected)
    return engine, collected.texts
