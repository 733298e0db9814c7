"""The server over an engine on a GPU: graphs, the host a step behind, and clients that leave meanwhile."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.engine.engine import Engine
from peagle.target import Target, load_target
from tests.engine.helpers import ASCII, tiny_head
from tests.server.conftest import K, Start, wait_for
from tests.server.traffic import differences, make_asks, send_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
REQUESTS, CLIENTS = 120, 32


@pytest.fixture(scope="module")
def gpu_target(target_folder: Callable[[str], Path]) -> Target:
    loaded = load_target(str(target_folder("llama")), dtype="float32", device="cuda")
    with torch.no_grad():
        loaded.lm_head_weight[ASCII:] = 0
    return loaded


def gpu_engine(target: Target, kind: str | None, **config: Any) -> Engine:
    settings = EngineConfig(**({"max_num_seqs": 8, "max_model_len": 256, "num_kv_blocks": 100} | config))
    if kind is None:
        return Engine(target, config=settings)
    drafter = tiny_head(target, kind).to(target.device)
    drafter.bind(target.embed_weight, target.lm_head_weight)
    engine = Engine(target, drafter, K, settings)
    engine.capture()
    return engine


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("p-eagle", {}),
        ("p-eagle", {"num_kv_blocks": 28, "max_num_batched_tokens": 48}),  # too few, so that requests give way
        ("p-eagle", {"max_cudagraph_capture_size": 8}),  # larger steps run as they are
        ("eagle3", {"async_scheduling": False}),
        (None, {}),
    ],
)
def test_many_clients(start: Start, gpu_target: Target, kind: str | None, settings: dict[str, Any]) -> None:
    server = start(gpu_engine(gpu_target, kind, **settings), max_queue=3 * CLIENTS)
    dice = random.Random(21)
    prompts = [[dice.randrange(94) for _ in range(100)] for _ in range(12)]
    asks = make_asks(dice, REQUESTS, prompts, [chr(code) for code in range(40, 110)], longest=60)
    if kind is None:  # such a server refuses drafts
        for ask in asks:
            ask.params["num_speculative_tokens"] = None
    answers = send_all(server.url, asks, CLIENTS)
    server.settle()
    wrong, ties = differences(gpu_engine(gpu_target, None, enforce_eager=True), asks, answers, within=1e-2)
    assert not wrong, f"{len(wrong)} differ, the first: {wrong[0]}"
    assert ties <= REQUESTS // 20
    assert server.loop.metrics.finished["abort"]._value.get() > 0
    assert server.loop.metrics.finished["error"]._value.get() == 0


def test_drain(start: Start, gpu_target: Target) -> None:
    server = start(gpu_engine(gpu_target, "p-eagle"))
    body = {"prompt": [1, 2, 3], "max_tokens": 200, "ignore_eos": True, "n": 8}
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/v1/completions", body)
        wait_for(lambda: server.loop.num_open == 8)
        server.server.handle_exit(signal.SIGTERM, None)
        answer = running.result()
    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] == 8 * 200
    server.settle()
