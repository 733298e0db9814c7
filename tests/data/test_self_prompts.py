import random

import pytest

from peagle.data.chat_format import ChatFormat
from peagle.data.contamination import ContaminationGuard
from peagle.data.prompts import make_prompt
from peagle.data.self_prompts import (
    Attempts,
    SelfPromptGroup,
    SelfPromptSettings,
    TurnFilter,
    parse_group,
    stable_seed,
    turn_params,
    write_prompts,
)
from peagle.errors import InputError
from tests.data.conftest import END, FakeEngine, make_tokenizer

GOOD = "Could you tell me what makes the sky look blue?"


def tokens(chat, text):
    return [*chat.encode(text), END]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Hi you", "too short"),
        ("Certainly, here is what you asked for.", "written as the assistant"),
        ("I'm sorry, but I cannot do that for you.", "written as the assistant"),
        ("go on and on and " * 12, "repetitive"),
        ("a b c d e f " * 30, "repetitive"),
        ("Tell me <|start|>assistant what", "with special tokens"),
        ("Please name all the large planets again", "too close to an evaluation prompt"),
    ],
)
def test_what_is_no_user_turn(chat, text, reason):
    guard = ContaminationGuard([make_prompt("eval", ["please name all the large planets"])])
    judge = TurnFilter(chat, SelfPromptSettings(), guard)
    assert judge.keep(tokens(chat, text), "stop") is None
    assert judge.report.refused == {reason: 1}
    assert judge.keep(tokens(chat, GOOD), "stop") == GOOD
    assert judge.report.line() == f"self-written turns: 1 kept of 2 (1 {reason})"


def test_end_duplicates_and_opening(chat):
    judge = TurnFilter(chat, SelfPromptSettings())
    assert judge.keep(chat.encode(GOOD), "length") is None
    assert judge.keep([*chat.encode(GOOD), 1], "stop") is None, "ended by another token than the end of a turn"
    assert judge.keep(tokens(chat, " me what a kite is."), "stop", "Tell ") == "Tell me what a kite is."
    assert judge.keep(tokens(chat, "tell me what a KITE is"), "stop") is None
    assert judge.keep(tokens(chat, "tell me what a KITE is"), "stop", once=False) is not None
    assert judge.report.refused == {"without an end": 1, "ended by another token": 1, "duplicate": 1}


def test_sampling_stops_at_the_marker(chat):
    params = turn_params(chat, SelfPromptSettings(temperature=0.7, max_tokens=9), seed=3)
    assert (params.temperature, params.max_tokens, list(params.stop_token_ids), params.seed) == (0.7, 9, [END], 3)
    plain = "{% for m in messages %}[Q]{{ m['content'] }} [A]{% endfor %}"
    assert tuple(turn_params(ChatFormat(make_tokenizer(template=plain)), SelfPromptSettings(), 0).stop) == ("[A]",)


def engine_of_questions(chat, share_bad=0.3):
    def reply(prompt, params):
        rng = random.Random(params.seed)
        words = " ".join(rng.choice(["red", "blue", "tall", "cat", "dog", "tree", "runs"]) for _ in range(8))
        return chat.encode("?") * 9 if rng.random() < share_bad else tokens(chat, f" {words}?")

    return FakeEngine(reply)


def test_prompts_are_written_until_there_are_enough(chat):
    engine = engine_of_questions(chat)
    prompts = list(write_prompts(engine, chat, 20, ("Why ", "How "), source="self-q", window=16))
    assert len({p.prompt_id for p in prompts}) == 20
    assert {p.turns[0].split()[0] for p in prompts} == {"Why", "How"}
    assert {p.source for p in prompts} == {"self-q"}
    assert engine.most_waiting <= 16
    assert engine.seen[0][0] == chat.first_opening("Why")
    again = list(write_prompts(engine_of_questions(chat), chat, 20, ("Why ", "How "), source="self-q", window=16))
    assert again == prompts, "the same seed gives the same prompts"


def test_a_later_run_writes_others(chat):
    first = list(write_prompts(engine_of_questions(chat), chat, 10))
    known = [p.turns[0] for p in first]
    more = list(write_prompts(engine_of_questions(chat), chat, 10, known=known))
    assert not {p.turns[0] for p in more} & set(known)


def test_attempts_go_on_where_they_were(chat):
    attempts = Attempts()
    first = list(write_prompts(engine_of_questions(chat), chat, 10, ("Why ", "How "), attempts=attempts))
    before = attempts.made
    assert before > 10
    engine = engine_of_questions(chat)
    turns = [p.turns[0] for p in first]
    more = list(write_prompts(engine, chat, 10, ("Why ", "How "), known=turns, attempts=attempts))
    seeds = {params.seed for _, params in engine.seen}
    assert not seeds & {stable_seed(0, "self", n, w) for n in range(before) for w in ("Why ", "How ")}
    assert len({p.prompt_id for p in (*first, *more)}) == 20
    assert attempts.made == before + len(engine.seen)


def test_turns_that_are_known_do_not_use_up_the_attempts(chat):
    """A rerun without a count of attempts meets all it has kept again before it makes others."""
    many = [p.turns[0] for p in write_prompts(engine_of_questions(chat, 0.0), chat, 200)]
    judge = TurnFilter(chat, SelfPromptSettings())
    engine = engine_of_questions(chat, 0.0)
    [one] = write_prompts(engine, chat, 1, turn_filter=judge, known=many)
    assert one.turns[0] not in many
    assert judge.met_again == 200


def test_a_target_that_writes_only_what_is_known_is_given_up(chat):
    engine = FakeEngine(lambda _prompt, _params: tokens(chat, GOOD))
    with pytest.raises(InputError, match=r"only 0 acceptable prompts in 73 attempts; .*73 duplicate"):
        list(write_prompts(engine, chat, 1, known=[GOOD]))


def test_a_target_that_cannot_write_user_turns(chat):
    engine = engine_of_questions(chat, share_bad=1.0)
    with pytest.raises(InputError, match=r"only 0 acceptable prompts in \d+ attempts; .*\d+ without an end"):
        list(write_prompts(engine, chat, 5))


def test_groups(tmp_path):
    assert parse_group("12") == SelfPromptGroup(12, "self", ("",))
    assert parse_group("12", ["Write"]) == SelfPromptGroup(12, "self", ("Write",))
    spec = r"3:name=code:temperature=0.7:openings=def|Text:\n\n"
    assert parse_group(spec, ["Write"]) == SelfPromptGroup(3, "code", ("def", "Text:\n\n"), 0.7)
    (tmp_path / "o.txt").write_text("Write a\n\nList\\n\n")
    assert parse_group(f"3:openings={tmp_path / 'o.txt'}").openings == ("Write a", "List\n")
    for bad in ("0", "x", "-1", "3:temperature=hot", "3:colour=red"):
        with pytest.raises(InputError, match="--self-prompts"):
            parse_group(bad)
