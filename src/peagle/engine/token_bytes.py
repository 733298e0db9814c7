"""The bytes of a token that is only a part of a character, which its text (U+FFFD) does not say."""

from __future__ import annotations

import re

from transformers import PreTrainedTokenizerBase

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's way to write a byte


def _byte_level() -> dict[str, int]:
    """The characters that byte-level vocabularies (GPT-2's and after) are written in, and the bytes they stand for."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


BYTE_LEVEL = _byte_level()


def partial_bytes(tokenizer: PreTrainedTokenizerBase, token_id: int, text: str) -> bytes | None:
    """The bytes of a token whose text has U+FFFD in it; None for all others, and for vocabularies of another kind."""
    if "\ufffd" not in text:
        return None
    piece = tokenizer.convert_ids_to_tokens(token_id)
    if not isinstance(piece, str):
        return None
    if (byte := BYTE_PIECE.fullmatch(piece)) is not None:
        return bytes([int(byte[1], 16)])
    values = [BYTE_LEVEL.get(char) for char in piece]
    return None if None in values else bytes(value for value in values if value is not None)
