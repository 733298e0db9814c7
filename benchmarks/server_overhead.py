"""What a server adds to the steps of its engine: scheduling, text, metrics and HTTP, without a model.

The runner is replaced by one that waits as long as a step of a fast GPU would and makes tokens up, so that what is left
is the host's own work. A closed loop of users in a process of its own streams answers of a fixed length; printed are
tokens/s, how many steps there were, and how long a step took beside how long it should have.

usage: python benchmarks/server_overhead.py TARGET [--users 1,8,64] [--drafts 7] [--step-ms 1.5] [--stream-interval 20]
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import threading
import time
from contextlib import aclosing
from pathlib import Path
from typing import Annotated

import httpx
import typer

from peagle.client.pool import ClientPool
from peagle.client.stream import stream_chunks
from peagle.config.engine import EngineConfig
from peagle.engine.engine import Engine
from peagle.engine.plan import StepPlan, StepResult
from peagle.engine.runner import Launched
from peagle.server.app import AppSettings, create_app
from peagle.server.engine_loop import EngineLoop
from peagle.server.run import bind, make_server
from peagle.target.loading import load_target

PROMPT = "Tell me a story about a lighthouse keeper. " * 12
ACCEPTED = 0.7  # of the drafts that were not rejected so far


class MadeUpRunner:
    """Steps that take a given time and choose random tokens; the host may start one ahead."""

    def __init__(self, drafts: int, seconds: float) -> None:
        self.drafts, self.seconds, self.rng = drafts, seconds, random.Random(0)
        self.free_at = 0.0  # when the device has done what it was given

    def launch(self, plan: StepPlan) -> Launched:
        decodes = all(rows == 1 + n for rows, n in zip(plan.query_lens, plan.num_drafts, strict=True))
        return self._start(len(plan.lanes), decodes)

    def repeat(self, plan: StepPlan) -> Launched:
        return self._start(len(plan.lanes), True)

    def _start(self, requests: int, repeatable: bool) -> Launched:
        self.free_at = ends = max(self.free_at, time.perf_counter()) + self.seconds
        rng, k = self.rng, self.drafts
        accepted = [next((i for i in range(k) if rng.random() > ACCEPTED), k) for _ in range(requests)]

        def wait() -> StepResult:
            while (left := ends - time.perf_counter()) > 0:
                time.sleep(left)
            return StepResult(
                [[rng.randrange(1000, 40000) for _ in range(k + 1)] for _ in accepted], accepted, [k] * requests
            )

        return Launched(wait, repeatable)


async def ask(url: str, users: int, answers: int, tokens: int) -> None:
    """`users` at a time stream so many answers; prints the seconds."""
    left = answers

    async def user() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            body = {
                "model": "m",
                "prompt": PROMPT,
                "max_tokens": tokens,
                "stream": True,
                "temperature": 0,
                "ignore_eos": True,
            }
            with clients.client() as client:
                async for _ in stream_chunks(client, f"{url}/v1/completions", body):
                    pass

    async with aclosing(ClientPool(httpx.Timeout(60.0), {}, users)) as clients:
        began = time.perf_counter()
        await asyncio.gather(*(user() for _ in range(users)))
        print(time.perf_counter() - began)


def main(
    target: str,
    users: str = "1,8,64",
    drafts: int = 7,
    step_ms: float = 1.5,
    stream_interval: int = 20,
    tokens: int = 200,
    answers_a_user: int = 4,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    client_of: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    if client_of is not None:
        asyncio.run(ask(client_of, int(users), int(users) * answers_a_user, tokens))
        return
    engine = Engine(
        load_target(target, device="cpu"),
        config=EngineConfig(max_num_seqs=64, max_model_len=2048, num_kv_blocks=9000, enable_prefix_caching=False),
    )
    engine.num_speculative_tokens = drafts
    runner = MadeUpRunner(drafts, step_ms / 1e3)
    engine.runner = runner  # type: ignore[assignment]
    engine._runs_ahead = True  # as on a GPU
    loop = EngineLoop(engine, "m", 1000)
    sock = bind("127.0.0.1", 0)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    server = make_server(create_app(loop, AppSettings(("m",), stream_interval=stream_interval)), loop, 1.0, False)
    found = []

    def measure() -> None:
        for count in map(int, users.split(",")):
            command = [sys.executable, __file__, target, "--client-of", url, "--users", str(count)]
            command += ["--tokens", str(tokens), "--answers-a-user", str(answers_a_user)]
            subprocess.run([*command[:-1], "1"], capture_output=True, text=True, check=True)  # warm-up
            before = engine.stats.num_steps
            seconds = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
            steps = engine.stats.num_steps - before
            rate = count * answers_a_user * tokens / seconds
            found.append({"users": count, "tokens_per_second": rate, "steps": steps, "step_ms": 1e3 * seconds / steps})
            print(
                f"{count:4} users {rate:9.0f} tokens/s, {steps} steps of {1e3 * seconds / steps:.2f} ms "
                f"(device {step_ms} ms)"
            )

    def measure_and_end() -> None:
        try:
            measure()
        except subprocess.CalledProcessError as error:
            print(error.stderr, file=sys.stderr)
        finally:
            server.should_exit = True

    thread = threading.Thread(target=measure_and_end)
    thread.start()
    server.run(sockets=[sock])
    thread.join()
    if json_path is not None:
        json_path.write_text(json.dumps({"step_ms": step_ms, "drafts": drafts, "found": found}, indent=1))


if __name__ == "__main__":
    typer.run(main)
