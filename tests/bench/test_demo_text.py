from peagle.bench.demo_text import TokenText, WordWrap
from tests.conftest import make_tokenizer


def pieces_of(text: str, accepted: list[bool], size: int):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown = TokenText(tokenizer, [])
    got = []
    for start in range(0, len(ids), size):
        got.append(shown.push(ids[start : start + size], accepted[start : start + size]))
    return got, shown.finish()


def test_runs_of_one_origin_are_one_piece():
    got, rest = pieces_of("abcdef", [True, True, False, False, True, True], 6)
    assert got == [[("ab", True), ("cd", False), ("ef", True)]]
    assert rest == []


def test_a_character_of_several_tokens_waits_for_its_last():
    got, rest = pieces_of("aé", [False, False, True], 1)
    assert got == [[("a", False)], [], [("é", True)]]
    assert rest == []


def test_an_unfinished_character_is_shown_at_the_end():
    tokenizer = make_tokenizer()
    shown = TokenText(tokenizer, [])
    assert shown.push(tokenizer.encode("é", add_special_tokens=False)[:1], [True]) == []
    assert shown.finish() == [("\ufffd", True)]


def wrapped(parts: list[tuple[str, bool]], width: int = 10, indent: str = "  ") -> str:
    out: list[str] = []
    wrap = WordWrap(width, indent, lambda text, _: out.append(text), len)
    for part in parts:
        wrap.push([part])
    wrap.finish()
    return "".join(out)


def test_words_are_not_broken_however_they_arrive():
    whole = wrapped([("one two three four", False)])
    assert whole == "  one two \n  three \n  four\n"
    assert wrapped([(c, i % 2 == 0) for i, c in enumerate("one two three four")]) == whole


def test_a_word_longer_than_the_line_is_left_to_the_terminal():
    assert wrapped([("abcdefghijklmnop q", False)]) == "  abcdefghijklmnop\n  q\n"


def test_lines_of_code_keep_their_indent():
    assert wrapped([("def f:\n    x = 1\n\n\ty", False)], width=40) == "  def f:\n      x = 1\n\n      y\n"


def test_nothing_prints_nothing():
    assert wrapped([]) == ""
