from collections.abc import Callable

import pytest

from peagle.bench.conversations import Chat, answer_conversations
from peagle.data.prompts import Prompt, make_prompt
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError
from peagle.target.model import Target
from tests.bench.scripted import ScriptedEngine
from tests.conftest import EOS


@pytest.fixture
def target(tiny_target: Callable[[str], Target]) -> Target:
    return tiny_target("llama")


@pytest.fixture
def chat(target: Target) -> Chat:
    return Chat(target)


def prompts(*turns: list[str]) -> list[Prompt]:
    return [make_prompt("made up", each) for each in turns]


def test_second_turn_holds_the_own_answer(chat):
    engine = ScriptedEngine([(0, 0), (2, 2)])
    done: list[int] = []
    answers = answer_conversations(
        engine, chat, prompts(["hi", "and now?"], ["yo"]), SamplingParams(seed=1), done.append
    )
    first, second = answers.turns[0]
    assert second.prompt_token_ids[: len(first.prompt_token_ids)] == first.prompt_token_ids
    after = second.prompt_token_ids[len(first.prompt_token_ids) :]
    assert after[:4] == first.token_ids
    rest = chat.tokenizer.decode(after[4:])
    assert rest == "<|end|><user>and now?<|end|><assistant>"
    assert len(answers.turns[1]) == 1
    assert engine.most_at_once == 2
    assert done == [2, 3]
    assert len({params.seed for _, _, params in engine.asked}) == 3


def test_a_finished_answer_keeps_its_own_end(chat):
    engine = ScriptedEngine([], answers={0: [70, EOS]})
    answers = answer_conversations(engine, chat, prompts(["hi", "more"]), SamplingParams(num_speculative_tokens=0))
    second = answers.turns[0][1].prompt_token_ids
    assert second.count(EOS) == 3  # after each user turn and after the answer, once


def test_a_later_turn_that_does_not_fit_is_left_out(chat):
    engine = ScriptedEngine([(0, 0)], max_model_len=100)
    done: list[int] = []
    answers = answer_conversations(
        engine, chat, prompts(["hi", "x" * 200, "never"], ["yo"]), SamplingParams(), done.append
    )
    assert [len(turns) for turns in answers.turns] == [1, 1]
    assert answers.num_skipped == 2
    assert done == [4]


def test_a_first_turn_that_does_not_fit_is_refused(chat):
    engine = ScriptedEngine([(0, 0)], max_model_len=100)
    with pytest.raises(InputError, match=r"prompt 2 of made up has \d+ tokens, expected fewer than 100"):
        answer_conversations(engine, chat, prompts(["hi"], ["x" * 200]), SamplingParams())
    assert not engine.asked


def test_without_chat_template_the_bare_text(target, monkeypatch):
    monkeypatch.setattr(target.tokenizer, "chat_template", None)
    chat = Chat(target)
    prompt = make_prompt("s", ["ab", "cd"])
    assert chat.tokenizer.decode(chat.first(prompt)) == "ab"
    engine = ScriptedEngine([(0, 0)])
    answers = answer_conversations(engine, chat, [prompt], SamplingParams())
    assert answers.num_skipped == 1
