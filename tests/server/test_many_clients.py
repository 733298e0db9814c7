"""Many requests at once give what each gives alone."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from peagle.engine.sampling_params import SamplingParams
from peagle.target import Target
from tests.server.conftest import Start, tiny_engine

Alone = Callable[[list[int], SamplingParams], tuple[str, list[int], str]]


def test_sixty_requests_of_twelve_clients(start: Start, target: Target, alone: Alone) -> None:
    dice = random.Random(4)
    # few blocks, so that requests wait and give way
    server = start(tiny_engine(target, max_num_seqs=6, num_kv_blocks=24, max_num_batched_tokens=32))
    work: list[tuple[list[int], dict[str, Any], bool, bool]] = []
    for i in range(60):
        params: dict[str, Any] = {
            "max_tokens": dice.randint(1, 50),
            "temperature": dice.choice([0.0, 0.0, 0.7, 1.0]),
            "top_p": dice.choice([1.0, 0.9]),
            "top_k": dice.choice([0, 5, 20]),
            "seed": i,
            "ignore_eos": dice.random() < 0.5,
            "num_speculative_tokens": dice.choice([None, None, 0, 1]),
        }
        if dice.random() < 0.3:
            params["stop"] = [chr(dice.randint(40, 100)) for _ in range(3)]
        prompt = [dice.randrange(94) for _ in range(dice.randint(1, 80))]
        work.append((prompt, params, dice.random() < 0.2, dice.random() < 0.5))

    def ask(job: tuple[list[int], dict[str, Any], bool, bool]) -> tuple[str, list[int], str] | None:
        prompt, params, leaves, stream = job
        body = {"prompt": prompt, "return_token_ids": True, **params}
        if leaves:
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
            ) as answer:
                next(answer.iter_raw(), None)
            return None
        if stream:
            text, ids, reason = "", [], ""
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=60
            ) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        text += choice["text"]
                        ids += choice["token_ids"]
                        reason = choice["finish_reason"] or reason
            return text, ids, reason
        choice = server.post("/v1/completions", body).json()["choices"][0]
        return choice["text"], choice["token_ids"], choice["finish_reason"]

    with ThreadPoolExecutor(12) as clients:
        answers = list(clients.map(ask, work))
    for (prompt, params, leaves, _), answer in zip(work, answers, strict=True):
        if not leaves:
            assert answer == alone(prompt, SamplingParams(**params))
    server.settle()
