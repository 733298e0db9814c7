from collections.abc import Callable

import pytest

from peagle.bench.acceptance import PromptSet, check_answers, evaluate_head
from peagle.bench.conversations import Answers, Turn
from peagle.data.prompts import make_prompt
from peagle.engine.sampling_params import SamplingParams
from peagle.target.model import Target
from tests.bench.scripted import ScriptedEngine

# K = 3; the last step is near the length limit and drafts 1
SCRIPT = [(0, 0), (3, 3), (3, 1), (3, 0), (1, 1)]


@pytest.fixture
def target(tiny_target: Callable[[str], Target]) -> Target:
    return tiny_target("llama")


def prompt_set(*turns: list[str]) -> PromptSet:
    return PromptSet("made up", [make_prompt("made up", each) for each in turns])


def test_rates_by_hand(target):
    """The prefill drafts nothing, and the short step counts for position 1 only."""
    engine = ScriptedEngine(SCRIPT)
    (row,) = evaluate_head(
        engine, target, "head", "p-eagle", [prompt_set(["one"], ["two"])], [3], [0.0], SamplingParams()
    )
    assert row.spec.drafts_per_pos == [8, 6, 6]  # two requests
    assert row.spec.accepted_per_pos == [6, 2, 2]
    assert row.spec.acceptance_length == pytest.approx(1 + (3 + 1 + 0 + 1) / 4)
    assert row.spec.reached_per_pos == [8, 4, 2]
    assert row.spec.conditional_rates == pytest.approx([3 / 4, 1 / 2, 1])
    assert row.spec.joint_rates == pytest.approx([3 / 4, 3 / 8, 3 / 8])
    assert row.num_output_tokens == 2 * (1 + 4 + 2 + 1 + 2)
    assert (row.num_prompts, row.num_turns, row.num_skipped) == (2, 2, 0)
    as_json = row.to_dict()
    assert as_json["acceptance_length"] == pytest.approx(2.25)
    assert as_json["spec"]["num_accepted_tokens"] == 10


def test_every_combination_starts_from_zero(target):
    engine = ScriptedEngine([(0, 0), (2, 1)])
    rows = evaluate_head(
        engine,
        target,
        "head",
        "eagle3",
        [prompt_set(["one"]), prompt_set(["two"], ["three"])],
        [1, 2],
        [0.0, 0.8],
        SamplingParams(max_tokens=9, seed=5),
    )
    assert [(r.num_prompts, r.temperature, r.k) for r in rows] == [
        (n, t, k) for n in (1, 2) for t in (0.0, 0.8) for k in (1, 2)
    ]
    assert [r.spec.num_drafts for r in rows] == [1, 1, 1, 1, 2, 2, 2, 2]
    first = engine.asked[0][2]
    assert (first.temperature, first.num_speculative_tokens, first.max_tokens) == (0.0, 1, 9)


def test_check_finds_the_first_difference(target):
    ids = [1, 2, 3]
    plain = Answers([[Turn(ids, [4, 5]), Turn([*ids, 4, 5, 6], [7])], [Turn(ids, [8])]])
    same = check_answers(target, plain, plain)
    assert (same.num_answers, same.num_equal, same.first) == (3, 3, None)
    other = Answers([[Turn(ids, [4, 9]), Turn([*ids, 4, 9, 6], [1])], [Turn(ids, [9])]])
    check = check_answers(target, plain, other)
    assert (check.num_answers, check.num_equal) == (2, 0)  # the turn behind a difference is not compared
    assert check.first is not None
    assert (check.first.prompt, check.first.turn, check.first.index) == (0, 0, 1)
    assert (check.first.plain_token, check.first.other_token) == (5, 9)
    assert check.first.logit_gap is not None
    assert check.first.logit_gap > 0


def test_check_decodes_plainly_first_and_once_for_all_heads(target):
    engine = ScriptedEngine([], answers={0: [70, 71], 2: [70, 71], 3: [70, 72]})
    plain: dict[tuple[str, float], Answers] = {}
    prompts = [prompt_set(["one"])]
    rows = evaluate_head(engine, target, "head", "p-eagle", prompts, [2, 3], [0.0], SamplingParams(), plain)
    assert [params.num_speculative_tokens for _, _, params in engine.asked] == [0, 2, 3]
    assert [row.check and row.check.num_equal for row in rows] == [1, 0]
    evaluate_head(engine, target, "other", "eagle3", prompts, [2], [0.0], SamplingParams(), plain)
    assert [params.num_speculative_tokens for _, _, params in engine.asked] == [0, 2, 3, 2]
