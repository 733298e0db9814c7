"""The bytes of tokens that are parts of characters, in both ways that vocabularies write them."""

from __future__ import annotations

from typing import Any, cast

from transformers import PreTrainedTokenizerBase

from peagle.engine.token_bytes import BYTE_LEVEL, partial_bytes
from tests.conftest import make_tokenizer


def test_every_byte_has_its_character() -> None:
    assert sorted(BYTE_LEVEL.values()) == list(range(256))
    assert BYTE_LEVEL["Ġ"] == 0x20
    assert BYTE_LEVEL["Ċ"] == 0x0A


def test_a_byte_level_vocabulary() -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(" 日👍", add_special_tokens=False).input_ids
    parts = [partial_bytes(tokenizer, token, str(tokenizer.decode([token]))) for token in ids]
    assert parts[0] is None  # a space is whole
    assert b"".join(part or b"" for part in parts).decode() == "日👍"
    assert partial_bytes(tokenizer, 257, "<|end|>") is None


def test_other_vocabularies() -> None:
    class Pieces:
        def convert_ids_to_tokens(self, token: int) -> Any:
            return {0: "<0xE2>", 1: "▁\ufffd", 2: None}[token]

    tokenizer = cast("PreTrainedTokenizerBase", Pieces())
    assert partial_bytes(tokenizer, 0, "\ufffd") == b"\xe2"
    assert partial_bytes(tokenizer, 1, "\ufffd") is None  # the replacement character itself
    assert partial_bytes(tokenizer, 2, "\ufffd") is None
