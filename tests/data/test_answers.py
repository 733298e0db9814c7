import pytest

from peagle.data.answers import AnswerSettings, parse_temperature, temperatures_of, write_answers
from peagle.data.dataset import open_dataset
from peagle.data.metadata import target_facts
from peagle.data.prompts import make_prompt
from peagle.data.shards import ShardWriter, answered_prompts, prepare_folder
from peagle.errors import InputError
from tests.data.conftest import END, FakeEngine

PROMPTS = [make_prompt("t", [f"Question number {i} please"]) for i in range(20)]
# Split oddly on purpose: text tokenised anew would never come out as these ids.
ANSWER = [70, 71, 200, 72, END]


@pytest.fixture
def folder(tmp_path, chat):
    prepare_folder(tmp_path / "answers", target_facts("tiny", chat.tokenizer, 300), {})
    return tmp_path / "answers"


def run(engine, chat, folder, prompts=PROMPTS, settings=AnswerSettings(), max_model_len=400, rows=4096, **kwargs):
    done = answered_prompts(folder)
    return write_answers(engine, chat, prompts, ShardWriter(folder, rows=rows), settings, max_model_len, done, **kwargs)


def spans(example):
    """Answer spans of an example, as lists of token ids."""
    found, previous = [], False
    for token, answered in zip(example.input_ids.tolist(), example.answer_mask.tolist(), strict=True):
        if answered and not previous:
            found.append([])
        if answered:
            found[-1].append(token)
        previous = answered
    return found


def test_tokens_as_generated_behind_the_rendered_prompt(chat, folder):
    engine = FakeEngine(lambda prompt, params: ANSWER)
    report = run(engine, chat, folder)
    dataset = open_dataset(folder)
    assert (report.conversations, report.answers, report.answer_tokens, report.cut) == (20, 20, 100, 0)
    by_id = {dataset.prompt_ids[i]: dataset[i] for i in range(20)}
    for prompt in PROMPTS:
        example = by_id[prompt.prompt_id]
        assert example.input_ids.tolist() == chat.first_turn(prompt.turns[0]) + ANSWER
        assert spans(example) == [ANSWER]


def test_cut_answers_are_kept(chat, folder):
    run(FakeEngine(lambda prompt, params: [70] * 50), chat, folder, settings=AnswerSettings(max_tokens=7))
    dataset = open_dataset(folder)
    assert set(dataset.finish_reasons) == {"length"}
    assert set(dataset.answer_lengths.tolist()) == {7}


def test_the_models_length_bounds_an_answer_and_drops_a_prompt(chat, folder):
    prompts = [make_prompt("t", ["short one here"]), make_prompt("t", ["long " * 100])]
    length = len(chat.first_turn("short one here"))
    report = run(FakeEngine(lambda prompt, params: [70] * 50), chat, folder, prompts, max_model_len=length + 9)
    assert report.skipped == {"longer than the model": 1}
    assert open_dataset(folder).answer_lengths.tolist() == [9]


def test_engine_is_kept_full_but_not_flooded(chat, folder):
    engine = FakeEngine(lambda prompt, params: ANSWER)
    run(engine, chat, folder, window=6)
    assert engine.most_waiting == 6


def test_interrupted_and_resumed(chat, folder):
    engine = FakeEngine(lambda prompt, params: ANSWER, stop_after=5)
    with pytest.raises(KeyboardInterrupt):
        run(engine, chat, folder)
    before = set(answered_prompts(folder))
    assert 0 < len(before) < 20
    second = FakeEngine(lambda prompt, params: ANSWER)
    report = run(second, chat, folder)
    assert report.skipped == {"answered before": len(before)}
    assert len(second.seen) == 20 - len(before)
    dataset = open_dataset(folder)
    assert sorted(dataset.prompt_ids) == sorted(p.prompt_id for p in PROMPTS)
    assert run(FakeEngine(lambda prompt, params: ANSWER), chat, folder).answers == 0


def test_temperatures_split_the_prompts(chat, folder):
    settings = AnswerSettings(temperatures=((0.0, 1.0), (0.8, 1.0)))
    engine = FakeEngine(lambda prompt, params: ANSWER)
    run(engine, chat, folder, settings=settings)
    dataset = open_dataset(folder)
    assert len(dataset) == 20
    assert 4 <= (dataset.temperatures == 0).sum() <= 16
    assert {round(params.temperature, 3) for _, params in engine.seen} == {0.0, 0.8}
    many = [make_prompt("t", [str(i)]) for i in range(2000)]
    shares = AnswerSettings(temperatures=((0.0, 0.25), (0.8, 0.75)))
    cold = sum(temperatures_of(prompt, shares) == [0.0] for prompt in many)
    assert 400 < cold < 600


def test_every_temperature(chat, folder):
    settings = AnswerSettings(temperatures=((0.0, 1.0), (0.8, 1.0)), every=True)
    run(FakeEngine(lambda prompt, params: ANSWER), chat, folder, PROMPTS[:3], AnswerSettings())
    report = run(FakeEngine(lambda prompt, params: ANSWER), chat, folder, PROMPTS[:3], settings)
    assert (report.answers, report.skipped["answered before"]) == (3, 3)
    assert len(open_dataset(folder)) == 6


@pytest.mark.parametrize("text", ["x", "-1", "0.8=0", "0.8=x", "=1"])
def test_bad_temperature(text):
    with pytest.raises(InputError, match="--temperature"):
        parse_temperature(text)


def test_good_temperature():
    assert parse_temperature("0") == (0.0, 1.0)
    assert parse_temperature("0.8=0.25") == (0.8, 0.25)


def test_turns_of_the_prompt_are_answered_in_turn(chat, folder):
    prompt = make_prompt("mt", ["First question?", "Second question?"])
    run(FakeEngine(lambda p, params: ANSWER), chat, folder, [prompt])
    example = open_dataset(folder)[0]
    first = chat.first_turn("First question?") + ANSWER
    assert example.input_ids.tolist() == first + chat.later_turn("Second question?", first) + ANSWER
    assert spans(example) == [ANSWER, ANSWER]


def writes_users(chat, user):
    """An engine that writes `user` where a user turn is opened, and ANSWER elsewhere."""
    opening = chat.later_opening([END])

    def reply(prompt, params):
        return [*chat.encode(user), END] if prompt[-len(opening) :] == opening else ANSWER

    return FakeEngine(reply)


def test_the_target_writes_the_second_turn(chat, folder):
    settings = AnswerSettings(turns=2, temperatures=((0.0, 1.0),))
    engine = writes_users(chat, "And why is that so?")
    report = run(engine, chat, folder, PROMPTS[:2], settings, max_model_len=2000)
    assert report.answers == 4
    example = open_dataset(folder)[0]
    assert spans(example) == [ANSWER, ANSWER]
    assert "And why is that so?" in chat.tokenizer.decode(example.input_ids[~example.answer_mask])
    user_turns = [params for _, params in engine.seen if list(params.stop_token_ids or ()) == [END]]
    assert {params.temperature for params in user_turns} == {1.0}


def test_a_poor_second_turn_ends_the_conversation(chat, folder):
    run(writes_users(chat, "Ok"), chat, folder, PROMPTS[:2], AnswerSettings(turns=2), 2000)
    assert [spans(example) for example in open_dataset(folder)] == [[ANSWER], [ANSWER]]


def test_a_cut_answer_is_not_followed(chat, folder):
    engine = FakeEngine(lambda prompt, params: [70] * 50)
    run(engine, chat, folder, PROMPTS[:2], AnswerSettings(turns=2, max_tokens=5), 2000)
    assert len(engine.seen) == 2


def test_share_of_conversations_that_go_on(chat, folder):
    settings = AnswerSettings(turns=2, turns_share=0.5, max_tokens=20)
    run(writes_users(chat, "And why is that so?"), chat, folder, settings=settings, max_model_len=2000)
    two = sum(len(spans(example)) == 2 for example in open_dataset(folder))
    assert 4 <= two <= 16
