"""A running server over a tiny random target and head, on a loopback port."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI

from peagle.config.engine import EngineConfig
from peagle.engine.engine import Engine
from peagle.engine.runner import Launched
from peagle.engine.sampling_params import SamplingParams
from peagle.server.app import AppSettings, create_app
from peagle.server.engine_loop import EngineLoop
from peagle.server.run import DrainingServer, bind, make_server
from peagle.target import Target, load_target
from tests.engine.helpers import ASCII, tiny_head

K = 3
MODEL = "tiny"


@dataclass
class Running:
    """A server under test and what is inside it."""

    url: str
    engine: Engine
    loop: EngineLoop
    server: DrainingServer

    def client(self, **settings: Any) -> OpenAI:
        return OpenAI(**({"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 60} | settings))

    def post(self, path: str, body: Any, **settings: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, **settings)

    def settle(self) -> None:
        """Wait until nothing runs; then every block must be free again."""
        wait_for(lambda: not self.loop.num_open and not self.engine.requests)
        assert self.engine.blocks.num_free == self.engine.blocks.num_blocks


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def target(target_folder: Callable[[str], Path]) -> Target:
    """The tiny Llama, made to write only printable ASCII (token ids 0..93), one character a token."""
    loaded = load_target(str(target_folder("llama")), device="cpu")
    with torch.no_grad():
        loaded.lm_head_weight[ASCII:] = 0
    return loaded


def tiny_engine(target: Target, kind: str | None = "p-eagle", **config: Any) -> Engine:
    settings = {"max_num_seqs": 8, "max_model_len": 256, "num_kv_blocks": 100} | config
    if kind is None:
        return Engine(target, config=EngineConfig(**settings))
    return Engine(target, tiny_head(target, kind), K, EngineConfig(**settings))


Start = Callable[..., Running]


@pytest.fixture(scope="session")
def start(target: Target) -> Iterator[Start]:
    """start(engine=None, max_queue=..., drain_seconds=..., **AppSettings) -> a running server."""
    started: list[tuple[Running, threading.Thread]] = []

    def run(engine: Engine | None = None, max_queue: int = 100, drain_seconds: float = 30, **settings: Any) -> Running:
        engine = engine or tiny_engine(target)
        loop = EngineLoop(engine, MODEL, max_queue)
        app = create_app(loop, AppSettings(**({"model_names": (MODEL, "alias")} | settings)))
        server = make_server(app, loop, drain_seconds)
        sock = bind("127.0.0.1", 0)
        sock.listen()
        thread = threading.Thread(target=lambda: server.run(sockets=[sock]))
        thread.start()
        running = Running(f"http://127.0.0.1:{sock.getsockname()[1]}", engine, loop, server)
        started.append((running, thread))
        wait_for(lambda: server.started)
        return running

    yield run
    for running, thread in started:
        running.server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


@pytest.fixture(scope="session")
def server(start: Start) -> Running:
    """One with default settings, for tests that leave it as they found it."""
    return start()


@pytest.fixture(scope="session")
def alone(target: Target) -> Callable[[list[int], SamplingParams], tuple[str, list[int], str]]:
    """alone(prompt, params) -> text, token ids and finish reason of the engine itself, one request at a time."""
    engine = tiny_engine(target)

    def run(prompt: list[int], params: SamplingParams) -> tuple[str, list[int], str]:
        request = engine.add_request("one", prompt, params)
        while engine.has_unfinished:
            engine.step()
        return engine.text(request), request.output_token_ids, str(request.finish_reason)

    return run


def script(engine: Engine, token_ids: list[int]) -> None:
    """Make an engine without a head answer every prompt with these tokens, over and over."""
    launch = engine.runner.launch

    def scripted(plan: Any) -> Launched:
        result = launch(plan).wait()
        by_lane = {request.lane: request for request in engine.scheduler.running}
        for i, lane in enumerate(plan.lanes):
            done = len(by_lane[lane].output_token_ids)
            result.tokens[i] = [token_ids[done % len(token_ids)]]
        return Launched(lambda: result, False)

    engine.runner.launch = scripted  # type: ignore[method-assign]


def hold(engine: Engine) -> threading.Event:
    """Make the engine's steps wait until the event is set."""
    step, gate = engine.step, threading.Event()

    def held() -> Any:
        gate.wait(60)
        return step()

    engine.step = held  # type: ignore[method-assign]
    return gate
