"""`peagle serve`: a model with its head behind OpenAI's API."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from peagle.errors import InputError

if TYPE_CHECKING:
    from peagle.engine.engine import Engine


def refuse_absent(async_scheduling: bool | None, max_cudagraph_capture_size: int | None, kv_cache_dtype: str) -> None:
    """Flags of vLLM whose meaning this engine does not have are refused, never dropped."""
    if async_scheduling:
        raise InputError(
            "--async-scheduling: this engine plans a step after the one before it has ended; leave the flag out or "
            "give --no-async-scheduling"
        )
    if max_cudagraph_capture_size not in (None, 0):
        raise InputError(
            f"--max-cudagraph-capture-size: got {max_cudagraph_capture_size}, but this engine captures no CUDA graphs, "
            "every step runs eagerly; leave the flag out or give 0"
        )
    if kv_cache_dtype != "auto":
        raise InputError(
            f"--kv-cache-dtype: got {kv_cache_dtype!r}, expected auto: keys and values are kept in the model's dtype"
        )


def prefix_caching(enable: bool | None) -> dict[str, Any]:
    """The engine's setting for the flag, if the engine has a prefix cache; without one only "no" can be had."""
    from peagle.config import EngineConfig

    if any(field.name == "enable_prefix_caching" for field in fields(EngineConfig)):
        return {} if enable is None else {"enable_prefix_caching": enable}
    if enable:
        raise InputError(
            "--enable-prefix-caching: this engine has no prefix cache, every prompt is computed; leave the flag out or "
            "give --no-enable-prefix-caching"
        )
    return {}


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
    host: Annotated[str, typer.Option(metavar="HOST", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0 for any free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar="PEAGLE_API_KEY", help="Key that clients must send; may be given several times."
        ),
    ] = None,
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
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu or cuda; default: cuda where there is one.")
    ] = None,
    block_size: Annotated[int, typer.Option(metavar="N", help="Tokens a KV block.")] = 16,
    num_kv_blocks: Annotated[
        int | None, typer.Option(metavar="N", help="KV blocks; default: what the memory below holds.")
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(metavar="F", help="Part of the GPU's memory to use, weights included.")
    ] = 0.9,
    cpu_kv_cache_gib: Annotated[float, typer.Option(metavar="GIB", help="KV cache on a CPU.")] = 1.0,
    kv_cache_dtype: Annotated[str, typer.Option(metavar="DTYPE", help="auto: the model's dtype.")] = "auto",
    enable_prefix_caching: Annotated[
        bool | None,
        typer.Option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            help="Reuse what was computed of a prompt's beginning.",
        ),
    ] = None,
    enable_chunked_prefill: Annotated[
        bool,
        typer.Option(
            "--enable-chunked-prefill/--no-enable-chunked-prefill", help="Compute long prompts in several steps."
        ),
    ] = True,
    async_scheduling: Annotated[
        bool | None, typer.Option("--async-scheduling/--no-async-scheduling", help="Not there yet.")
    ] = None,
    max_cudagraph_capture_size: Annotated[
        int | None, typer.Option(metavar="N", help="Only 0, no CUDA graphs, is there yet.")
    ] = None,
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
    refuse_absent(async_scheduling, max_cudagraph_capture_size, kv_cache_dtype)

    from peagle.config import EngineConfig, SpeculativeConfig

    speculative = None if speculative_config is None else SpeculativeConfig.parse(speculative_config)
    config = EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        num_kv_blocks=num_kv_blocks,
        gpu_memory_utilization=gpu_memory_utilization,
        cpu_kv_cache_gib=cpu_kv_cache_gib,
        enable_chunked_prefill=enable_chunked_prefill,
        seed=seed,
        **prefix_caching(enable_prefix_caching),
    )
    try:
        from peagle.server.run import banner, bind, make_server
    except ImportError as error:
        raise InputError(f"serve needs the extra packages of peagle[server] ({error})") from error
    from peagle.server.app import AppSettings, create_app
    from peagle.server.engine_loop import EngineLoop

    sock = bind(host, port)
    engine, warnings = load(target, speculative, dtype, device, config, threads)
    settings = AppSettings(tuple(served_model_name or [target]), tuple(api_key or ()), stream_interval)
    engine_loop = EngineLoop(engine, settings.model_names[0], max_queue)
    server = make_server(create_app(engine_loop, settings), engine_loop, drain_timeout, access_log)
    shown = f"[{host}]" if ":" in host else host
    url = f"http://{shown}:{sock.getsockname()[1]}"
    sock.listen()  # from here on clients wait instead of being refused
    typer.echo(banner(engine, settings.model_names, url, warnings))
    server.run(sockets=[sock])


def load(
    target: str, speculative: object, dtype: str, device: str | None, config: object, threads: int | None
) -> tuple[Engine, list[str]]:
    """The engine, and what it warned of while it was made."""
    import torch
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    from peagle.engine.loading import load_engine

    if threads is not None:
        torch.set_num_threads(threads)
    set_verbosity_error()
    disable_progress_bar()
    logger, collected = logging.getLogger("peagle"), Collected()
    logger.addHandler(collected)
    try:
        engine = load_engine(target, speculative, dtype, device, config)  # type: ignore[arg-type]
    except torch.OutOfMemoryError as error:
        raise InputError(
            "out of memory while loading; lower --gpu-memory-utilization, --max-num-seqs, --max-num-batched-tokens or "
            f"--max-model-len ({error})"
        ) from error
    finally:
        logger.removeHandler(collected)
    return engine, collected.texts
