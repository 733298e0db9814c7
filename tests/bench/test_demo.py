import pytest

from peagle.bench import demo
from peagle.bench.demo import Answer, Mode, SweepPoint
from peagle.bench.demo_prompts import DEMO_PROMPTS, DemoPrompt
from peagle.engine.stats import SpecMetrics
from tests.bench.scripted import ScriptedEngine


class Recorder:
    """A screen that keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def prompt(self, index, total, prompt):
        self.calls.append(("prompt", index, total))

    def begin(self, label, prompt_ids):
        self.calls.append(("begin", label))

    def tokens(self, token_ids, accepted):
        self.calls.append(("tokens", list(token_ids), list(accepted)))

    def end(self, answer, plain):
        self.calls.append(("end", len(answer.token_ids), plain is not None))


def test_answer_marks_drafts_and_counts():
    seen = []
    got = demo.answer(ScriptedEngine([(0, 0), (3, 2), (3, 0)]), [10], 8, lambda ids, mask: seen.append((ids, mask)))
    assert got.token_ids == [11, 12, 13, 14, 15]
    assert got.accepted == [False, True, True, False, False]
    assert got.num_steps == 3
    assert got.spec.acceptance_length == 2.0
    assert len(seen) == 3


def test_only_engine_steps_are_timed(monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(demo.time, "perf_counter", lambda: float(next(clock)))
    got = demo.answer(ScriptedEngine([(0, 0), (0, 0)]), [10], 8, lambda *_: next(clock))
    assert got.seconds == 2.0  # one tick a step; the ticks that printing takes do not count
    assert got.tokens_per_second == 1.0


def test_modes_take_turns_prompt_by_prompt():
    modes = [Mode("plain", 0, ScriptedEngine([(0, 0)])), Mode("P-EAGLE", 7, ScriptedEngine([(0, 0)]))]
    screen = Recorder()
    between: list[int] = []
    answers = demo.run_prompts(
        modes, [DemoPrompt("a", "x"), DemoPrompt("b", "y")], [[1], [2]], 8, screen, between.append
    )
    assert [len(row) for row in answers] == [2, 2]
    assert [call[:2] for call in screen.calls if call[0] in ("prompt", "begin")] == [
        ("prompt", 0),
        ("begin", "plain"),
        ("begin", "P-EAGLE, K = 7"),
        ("prompt", 1),
        ("begin", "plain"),
        ("begin", "P-EAGLE, K = 7"),
    ]
    assert [call[2] for call in screen.calls if call[0] == "end"] == [False, True, False, True]
    assert between == [0, 1]


def test_totals_are_over_all_prompts():
    def made(tokens, seconds, drafts=0, accepted=0):
        spec = SpecMetrics(drafts, 3 * drafts, accepted)
        return Answer(list(range(tokens)), [False] * tokens, seconds, 0, spec)

    modes = [Mode("plain", 0, ScriptedEngine([])), Mode("EAGLE-3", 3, ScriptedEngine([]))]
    answers = [[made(10, 1.0), made(10, 0.25, 4, 6)], [made(30, 3.0), made(30, 0.75, 10, 20)]]
    plain, eagle = demo.totals(modes, answers)
    assert (plain.tokens_per_second, plain.speed_up, plain.acceptance_length) == (10.0, 1.0, 1.0)
    assert (eagle.tokens_per_second, eagle.speed_up) == (40.0, 4.0)
    assert eagle.acceptance_length == pytest.approx(1 + 26 / 14)


def test_differences_name_the_prompt():
    same, other = Answer([1, 2]), Answer([1, 3])
    assert demo.differences(None, [[0], [0]], [[same, same], [same, same]], 1) == []
    (found,) = demo.differences(None, [[0], [0]], [[same, same], [same, other]], 1)
    assert (found.prompt, found.index) == (1, 1)


def test_sweep_measures_each_depth_with_its_own_engine():
    made: list[int] = []

    def engine(k: int) -> ScriptedEngine:
        made.append(k)
        return ScriptedEngine([(0, 0), (k, k)])

    points = demo.sweep(engine, "P-EAGLE", [1, 2, 3], [[1], [2]], 8)
    assert made == [1, 2, 3]
    assert [point.acceptance_length for point in points] == [2.0, 3.0, 4.0]
    assert demo.best_k([SweepPoint("x", 1, 5.0, 1), SweepPoint("x", 2, 9.0, 1), SweepPoint("x", 3, 7.0, 1)]) == 2


def test_the_built_in_prompts_cover_what_people_ask():
    assert {prompt.kind for prompt in DEMO_PROMPTS} == {"chat", "code", "maths", "summary"}
