"""Text as it comes: whole characters, and no stop string's beginning."""

from __future__ import annotations

import random

import pytest

from peagle.engine.detokenizer import Beginnings, Detokenizer
from tests.conftest import make_tokenizer

TOKENIZER = make_tokenizer()  # a token a byte
TEXT = "naïve – 日本語 🦅 <eagle> ok"


def ids(text: str) -> list[int]:
    return list(TOKENIZER(text).input_ids)


def held_back(text: str, stop: list[str]) -> int:
    beginnings = Beginnings(stop)
    beginnings.feed(text)
    return beginnings.longest


def test_held_back() -> None:
    assert held_back("abc", ["cd", "bcx"]) == 2
    assert held_back("abc", ["x"]) == 0
    assert held_back("aa", ["aaa"]) == 2
    assert held_back("", ["a"]) == 0
    assert held_back("a", []) == 0


@pytest.mark.parametrize("seed", range(20))
def test_held_back_is_the_longest_beginning_of_any(seed: int) -> None:
    rng = random.Random(seed)

    def word(most: int) -> str:
        return "".join(rng.choices("ab", k=rng.randint(1, most)))

    stop, text = [word(9) for _ in range(4)], ""
    beginnings = Beginnings(stop)
    for _ in range(40):
        piece = word(5)
        text += piece
        beginnings.feed(piece)
        assert beginnings.longest == max(n for n in range(9) if any(text.endswith(s[:n]) for s in stop if n < len(s)))


def test_long_stop_strings_cost_a_step_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new character is looked at a few times a string, whatever came before it."""
    fed: list[int] = []
    feed = Beginnings.feed

    def counted(self: Beginnings, text: str) -> None:
        fed.append(len(text))
        feed(self, text)

    monkeypatch.setattr(Beginnings, "feed", counted)
    detokenizer = Detokenizer(TOKENIZER, [], stop=["a" * 1000 + "b"] * 64)
    for token in ids("a" * 50):
        detokenizer.push([token])
        assert detokenizer.take() == ""
    assert fed == [1] * 50


@pytest.mark.parametrize("seed", range(20))
def test_stop_strings_are_found_wherever_steps_cut_them(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices("abc", k=60))
    stop = ["".join(rng.choices("abc", k=rng.randint(3, 6))) for _ in range(3)]
    detokenizer, tokens, stopped = Detokenizer(TOKENIZER, [], stop), ids(text), None
    while tokens and stopped is None:
        stopped = detokenizer.push(tokens[:1])
        tokens = tokens[1:]
    ends = [(text.find(s) + len(s), s) for s in stop if s in text]
    if not ends:
        assert stopped is None
        return
    end = min(ends)[0]
    assert stopped in [s for at, s in ends if at == end]
    assert stopped is not None
    assert detokenizer.text == text[: end - len(stopped)]


@pytest.mark.parametrize("seed", range(5))
def test_multi_byte_characters_come_whole(seed: int) -> None:
    rng = random.Random(seed)
    detokenizer = Detokenizer(TOKENIZER, ids("prompt"))
    sent, rest = "", ids(TEXT)
    while rest:
        step = rng.randint(1, 4)
        detokenizer.push(rest[:step])
        rest = rest[step:]
        sent += detokenizer.take()
        assert TEXT.startswith(sent)
    assert sent + detokenizer.take(finished=True) == TEXT == detokenizer.text


def test_an_unfinished_character_at_the_end() -> None:
    detokenizer = Detokenizer(TOKENIZER, [])
    for token in ids("a🦅")[:3]:
        detokenizer.push([token])
    assert detokenizer.take() == "a"
    assert detokenizer.take(finished=True) == "\ufffd"
    assert detokenizer.text == TOKENIZER.decode(ids("a🦅")[:3])


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_stop_string_across_steps(step: int) -> None:
    detokenizer = Detokenizer(TOKENIZER, ids("p"), stop=["never", "<eagle>"])
    sent, rest, stopped = "", ids(TEXT), None
    while rest and stopped is None:
        stopped = detokenizer.push(rest[:step])
        rest = rest[step:]
        sent += detokenizer.take(finished=stopped is not None)
        assert "<" not in sent
    assert stopped == "<eagle>"
    assert sent == detokenizer.text == TEXT[: TEXT.index("<")]


def test_what_only_looked_like_a_stop_string_is_sent() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stop=["<end>"])
    sent = []
    for token in ids("a<en>b<"):
        detokenizer.push([token])
        sent.append(detokenizer.take())
    assert sent == ["a", "", "", "", "<en>", "b", ""]
    assert detokenizer.take(finished=True) == "<"


def test_stop_string_is_not_looked_for_in_what_may_not_stop() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stop=["ab"])
    assert detokenizer.push(ids("xaba"), may_stop=False) is None
    assert detokenizer.push(ids("cba")) is None
    assert detokenizer.push(ids("b")) == "ab"
    assert detokenizer.text == "xabacb"


def test_a_stop_string_counts_where_it_ends() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stop=["abc"])
    assert detokenizer.push(ids("xab"), may_stop=False) is None
    assert detokenizer.push(ids("c")) == "abc"
    assert detokenizer.text == "x"


def test_the_earliest_of_several() -> None:
    detokenizer = Detokenizer(TOKENIZER, [], stop=["cd", "bc"], include_stop=True)
    assert detokenizer.push(ids("abcdef")) == "bc"
    assert detokenizer.text == "abc"


def test_special_tokens() -> None:
    output = [*ids("hi"), 257]
    for skip, text in ((True, "hi"), (False, "hi<|end|>")):
        detokenizer = Detokenizer(TOKENIZER, ids("p"), skip_special_tokens=skip)
        detokenizer.push(output)
        assert detokenizer.take(finished=True) == text


@pytest.mark.parametrize("stride", [1, 3, 7, 20])
def test_only_the_last_character_waits(stride: int) -> None:
    """However many tokens come at once."""
    detokenizer, tokens, sent = Detokenizer(TOKENIZER, ids("prompt")), ids(TEXT), ""
    for end in range(stride, len(tokens), stride):
        detokenizer.push(tokens[end - stride : end])
        sent += detokenizer.take()
        assert sent == TEXT.encode()[:end].decode(errors="ignore")
