import pytest

from peagle.data.chat_format import ChatFormat
from peagle.errors import InputError
from tests.data.conftest import END, TEMPLATE, make_tokenizer


def test_parts_of_a_template(chat):
    assert chat.opening == "<|start|>system\nBe kind.<|end|>\n<|start|>user\n"
    assert chat.close_user == "<|end|>\n<|start|>assistant\n"
    assert chat.next_user == "<|end|>\n<|start|>user\n"
    assert (chat.end_of_user_id, chat.end_of_user_text) == (END, "<|end|>")


def test_turns_put_together_are_the_rendered_conversation(chat, tokenizer):
    answer = [*chat.encode("Hello!"), END]
    ids = chat.first_turn("Hi there") + answer
    ids += chat.later_turn("Bye", ids)
    messages = [
        {"role": "user", "content": "Hi there"},
        {"role": "assistant", "content": "Hello!"},
        {"role": "user", "content": "Bye"},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == rendered
    assert ids == chat.encode(rendered)


def test_an_answer_without_its_end_gets_one(chat):
    assert chat.later_turn("Bye", chat.encode("Hello"))[0] == END
    assert chat.later_turn("Bye", [END])[0] != END


def test_openings(chat, tokenizer):
    assert tokenizer.decode(chat.first_opening("def ")) == chat.opening + "def"
    assert tokenizer.decode(chat.later_opening([END])) == "\n<|start|>user\n"


def test_system_message(chat, tokenizer):
    assert tokenizer.decode(chat.first_turn("Hi", "Be rude.")).startswith(
        "<|start|>system\nBe rude.<|end|>\n<|start|>user\nHi"
    )


def test_user_words(chat, tokenizer):
    for ids in (chat.first_turn("Hi there"), chat.first_turn("Hi there", "Rude."), chat.later_turn("Hi there", [END])):
        assert chat.user_words(tokenizer.decode(ids)) == "Hi there"


def test_marker_of_plain_text():
    template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[Q] {{ m['content'] }} [A]"
        "{% else %}{{ m['content'] }}{% endif %}{% endfor %}"
    )
    chat = ChatFormat(make_tokenizer(template=template), [END])
    assert (chat.end_of_user_id, chat.end_of_user_text) == (None, "[A]")
    assert chat.next_user == "[Q] "


def test_template_of_one_turn():
    template = "{% if messages|length > 1 %}{{ raise_exception('one turn only') }}{% endif %}" + TEMPLATE
    chat = ChatFormat(make_tokenizer(template=template), [END])
    assert chat.next_user is None
    with pytest.raises(InputError, match="second user turn"):
        chat.later_turn("Bye", [END])


def test_no_template():
    with pytest.raises(InputError, match="no chat template"):
        ChatFormat(make_tokenizer(template=None), [END])
    with pytest.raises(InputError, match="does not show the user's words"):
        ChatFormat(make_tokenizer(template="hello"), [END])


def test_the_token_that_ends_an_answer(tokenizer):
    assert ChatFormat(tokenizer, [END]).end_of_answer_id == END
    assert ChatFormat(tokenizer, [END, 1]).end_of_answer_id == END, "the template's"
    assert ChatFormat(tokenizer, [1]).end_of_answer_id == 1, "the target never stops on the template's"
    assert ChatFormat(tokenizer, [0, 1]).end_of_answer_id is None
