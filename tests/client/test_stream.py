"""Events as they come: what cannot be read is said, and characters that JSON splits are put together."""

from __future__ import annotations

import pytest

from peagle.client.stream import StreamError, joined_text, parse_chunk, printable_text


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("{oops", "an event is no JSON .Expecting property name"),
        ('{"a": ' + "9" * 5000 + "}", "an event is no JSON .Exceeds the limit"),
        ("[" * 100_000, "an event is no JSON .maximum recursion depth"),
        ("[1]", "an event is no object"),
        ('{"error": {"message": "boom", "code": 500}}', "boom"),
    ],
)
def test_what_is_no_chunk(data, words):
    with pytest.raises(StreamError, match=words):
        parse_chunk(data)


def test_halves_of_a_character():
    assert joined_text("é\u2028\ud83d\ude00") == "é\u2028\U0001f600"
    for text in ("\ud83d", "\ude00\ud83d", "a\ude00"):
        with pytest.raises(StreamError, match="half a character"):
            joined_text(text)
    assert printable_text("a\ud83db\ud83d\ude00") == "a\ufffdb\U0001f600"
