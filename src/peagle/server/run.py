"""From a loaded engine to a server that answers, and its orderly end."""

from __future__ import annotations

import logging
import math
import signal
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from peagle.engine.engine import Engine, captured_rows
from peagle.errors import InputError
from peagle.server.engine_loop import EngineLoop
from peagle.server.errors import shutting_down

log = logging.getLogger(__name__)

# After the last request has ended its answer may still be on its way to the client: for the rest of the time to drain,
# and for so long at least.
FLUSH_SECONDS = 3


def bind(host: str, port: int) -> socket.socket:
    """A socket on the address, not listening yet: a port that is taken is told before a model is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
    except (OSError, OverflowError) as error:
        sock.close()
        raise InputError(f"host, port: cannot listen on {host}:{port} ({error})") from error
    return sock


class DrainingServer(uvicorn.Server):
    """uvicorn, with another end: the first SIGTERM or SIGINT makes new requests get 503 and lets those in flight finish
    (for drain_seconds at most; then they fail with 503), a second one ends at once. Either way the process returns."""

    def __init__(self, config: uvicorn.Config, engine_loop: EngineLoop, drain_seconds: float) -> None:
        super().__init__(config)
        self.engine_loop = engine_loop
        self.drain_seconds = drain_seconds
        self._deadline: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._deadline is not None:
            self._deadline = 0.0
            self.force_exit = self.should_exit  # what is written to clients is not waited for any more either
            return
        self.engine_loop.draining = True
        self._deadline = time.monotonic() + self.drain_seconds

    async def on_tick(self, counter: int) -> bool:
        """uvicorn calls it ten times a second; True ends the server."""
        if self._deadline is not None:
            late = time.monotonic() >= self._deadline
            if late and self.engine_loop.num_taken:
                log.warning("%d requests did not finish in time", self.engine_loop.num_taken)
                self.engine_loop.fail_all(shutting_down())
            if late or not self.engine_loop.num_taken:
                # finished answers may still be on their way to slow clients
                left = self._deadline - time.monotonic()
                self.config.timeout_graceful_shutdown = max(FLUSH_SECONDS, math.ceil(left))
                self.should_exit = True
        return await super().on_tick(counter)


def end_on_signals(server: DrainingServer) -> None:
    """Let SIGTERM and SIGINT end the server from now on, before it runs: uvicorn takes them when its loop has begun."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)


def make_server(app: FastAPI, engine_loop: EngineLoop, drain_seconds: float, access_log: bool = True) -> DrainingServer:
    """The HTTP server of an app; `run(sockets=[bind(...)])` serves until a signal ends it."""
    config = uvicorn.Config(
        app, log_level="warning", access_log=access_log, timeout_graceful_shutdown=FLUSH_SECONDS, timeout_keep_alive=75
    )
    return DrainingServer(config, engine_loop, drain_seconds)


def gpu_lines(engine: Engine) -> list[str]:
    """How steps run on a GPU; nothing on a CPU."""
    if engine.target.device.type != "cuda":
        return []
    rows = captured_rows(engine.config, engine.target.device, engine.num_speculative_tokens)
    graphs = f"CUDA graphs for steps of up to {rows} rows" if rows else "no CUDA graphs"
    ahead = "one step ahead of the host" if engine.config.async_scheduling else "no step ahead of the host"
    return [f"steps        {graphs} · {ahead}"]


def depth(engine: Engine) -> str:
    """How many drafts a request gets."""
    planner = engine.draft_planner
    if planner is None:
        return f"K = {engine.num_speculative_tokens}"
    if planner.table is None:
        return f"K = 0 to {engine.num_speculative_tokens}, by load"
    ranges = (f"{drafts} for {first} to {last}" for first, last, drafts in planner.table)
    return f"K = {', '.join(ranges)} requests"


def banner(
    engine: Engine, model_names: tuple[str, ...], url: str, warnings: list[str], head_name: str | None = None
) -> str:
    """What will run, for the terminal. head_name: the head's folder or id."""
    target, drafter, blocks = engine.target, engine.drafter, engine.blocks
    dtype = str(target.dtype).removeprefix("torch.")
    lines = [f"target       {target.name_or_path} · {dtype} on {target.device} · served as {', '.join(model_names)}"]
    if drafter is None:
        lines.append("head         none: plain decoding")
    else:
        kind = "P-EAGLE, all drafts in one pass" if drafter.config.kind == "p-eagle" else "EAGLE-3, one draft a pass"
        layers = drafter.config.num_hidden_layers
        named = "" if head_name is None else f"{head_name} · "
        seen = "" if engine.draft_window is None else f" · sees the last {engine.draft_window} positions"
        lines.append(f"head         {named}{kind} · {layers} layer{'s' * (layers > 1)} · {depth(engine)}{seen}")
    if engine.synthetic:
        lines.append(
            "BENCHMARK ONLY  synthetic acceptance: drafts are accepted by chance, and what comes out is no text"
        )
    held = blocks.num_blocks * blocks.block_size
    kept = f"{blocks.num_blocks} blocks of {blocks.block_size} · {held} tokens"
    prefix = "with" if engine.config.enable_prefix_caching else "without"
    lines += [
        f"KV cache     {kept} · {engine.config.kv_cache_dtype} · {prefix} prefix caching",
        f"limits       {engine.max_model_len} tokens a request · {engine.config.max_num_seqs} requests at once · "
        f"{engine.scheduler.max_num_batched_tokens} tokens a step"
        f"{'' if engine.config.enable_chunked_prefill else ' · a prompt in one'}",
        *gpu_lines(engine),
        *(f"warning      {text}" for text in warnings),
        f"listening    {url}",
    ]
    return "\n".join(lines)
