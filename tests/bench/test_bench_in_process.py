"""The engine in this process under the closed loop."""

from __future__ import annotations

import pytest

from peagle.bench.answer_check import check_answers, check_phrase
from peagle.bench.conversations import Chat
from peagle.bench.in_process import run_in_process
from peagle.bench.load_client import Sampling
from peagle.bench.questions import Questions
from peagle.bench.workloads import Workload
from peagle.config.engine import EngineConfig
from peagle.data.prompts import make_prompt
from peagle.engine.engine import Engine
from peagle.target.text import read_target_text
from tests.bench.scripted import ScriptedEngine

SCRIPT = [(0, 0), (3, 2), (3, 0)]


@pytest.fixture(scope="module")
def chat(target_folder):
    return Chat(read_target_text(str(target_folder("llama"))))


def conversations(*turns: list[str]) -> Workload:
    return Workload("made up", "", tuple(make_prompt("made up", each) for each in turns))


def test_a_closed_loop_with_later_turns(chat):
    engine = ScriptedEngine(SCRIPT)
    seen = []
    workload = conversations(["a", "b"], ["c"], ["d"], ["e"])
    run = run_in_process(engine, Questions(workload, chat, 9, 1000), 2, Sampling(seed=5), seen.append)
    assert engine.most_at_once == 2
    # the first conversation's second turn takes the place that its first one leaves
    assert [name for name, _, _ in engine.asked] == ["0.0", "1.0", "0.1", "2.0", "3.0"]
    assert [(r.conversation, r.turn) for r in run.records] == [(0, 0), (0, 1), (1, 0), (2, 0), (3, 0)]
    assert len(seen) == 5
    record = run.records[0]
    assert record.output_tokens == 5  # 1, then 3, then 1
    assert len(record.itls) == 2
    assert record.latency == pytest.approx(record.ttft + sum(record.itls))
    assert run.spec is not None
    assert (run.spec.num_drafts, run.spec.num_accepted_tokens) == (10, 10)
    assert len({params.seed for _, _, params in engine.asked}) == 5
    assert run.duration >= max(r.start + r.latency for r in run.records)


def test_an_engine_that_fails(chat):
    engine = ScriptedEngine(SCRIPT)
    step, steps = engine.step, []

    def failing():
        steps.append(1)
        if len(steps) == 5:
            raise RuntimeError("device lost")
        return step()

    engine.step = failing  # type: ignore[method-assign]
    run = run_in_process(engine, Questions(conversations(["a"], ["b"], ["c"], ["d"]), chat, 9, 1000), 1, Sampling())
    assert [r.failure for r in run.records] == [None, "engine", "not_sent", "not_sent"]
    assert run.records[1].error == "RuntimeError: device lost"
    assert run.failures == {"engine": 1, "not_sent": 2}


def test_the_real_engine_gives_the_same_answers_at_any_concurrency(tiny_target):
    target = tiny_target("llama")
    config = EngineConfig(max_num_seqs=4, max_model_len=200, num_kv_blocks=60, enable_prefix_caching=False)
    engine = Engine(target, config=config)
    workload = conversations(["abc", "more"], ["xyz"], ["hello"])
    runs = [
        run_in_process(engine, Questions(workload, Chat(target), 8, engine.max_model_len), c, Sampling())
        for c in (1, 3)
    ]
    assert [r.token_ids for r in runs[0].records] == [r.token_ids for r in runs[1].records]
    assert len(runs[0].records) == 4
    assert runs[0].cache_hits == 0
    exact = Workload("random", "", token_ids=((5, 6), (7, 8)), output_len=11)
    run = run_in_process(engine, Questions(exact, None, 3, engine.max_model_len), 2, Sampling())
    assert [r.output_tokens for r in run.records] == [11, 11]


def test_a_difference_comes_with_its_logit_gap(tiny_target):
    target = tiny_target("llama")
    engine = Engine(target, config=EngineConfig(max_num_seqs=2, max_model_len=200, num_kv_blocks=60))
    questions = Questions(conversations(["abc"], ["xyz"]), Chat(target), 6, engine.max_model_len)
    run = run_in_process(engine, questions, 1, Sampling())
    answers = [[r.conversation, r.turn, list(r.token_ids or ())] for r in run.records]
    assert check_answers(answers, run, target)["first"] is None
    answers[1][2][3] += 1
    first = check_answers(answers, run, target)["first"]
    assert (first["prompt"], first["index"]) == (1, 3)
    assert first["logit_gap"] > 0
    assert "logit gap" in check_phrase({"num_equal": 1, "num_answers": 2, "first": first})
