"""Events as they come: what cannot be read is said, and characters that JSON splits are put together."""

from __future__ import annotations

import asyncio
import gc
import sys
from contextlib import aclosing

import httpx
import pytest

from peagle.client.stream import StreamError, joined_text, parse_chunk, printable_text, stream_chunks
from tests.data.fake_endpoint import Reply, fake_endpoint

ERROR_EVENT = {"error": {"message": "boom", "code": 500}}


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


@pytest.mark.parametrize("raw", [{"choices": []}, ERROR_EVENT])
def test_a_stream_that_is_left_early_leaves_nothing_to_the_garbage_collector(raw):
    """What asyncio has to close later may still be pending when the loop ends: "Task was destroyed"."""
    dropped = []

    async def ask(url):
        sys.set_asyncgen_hooks(finalizer=dropped.append)
        body = {"prompt": [1], "max_tokens": 50}
        async with httpx.AsyncClient() as client:
            async with aclosing(stream_chunks(client, f"{url}/v1/completions", body)) as chunks:
                async for _ in chunks:
                    break
            gc.collect()

    with fake_endpoint(lambda body, n: Reply([70] * 50, raw=raw), lambda ids: "x") as fake:
        try:
            asyncio.run(ask(fake.url))
        except StreamError:
            assert raw is ERROR_EVENT
    assert dropped == []
