"""Tokens to marked text: what the demo's screens print as it comes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from peagle.engine.detokenizer import Detokenizer

Piece = tuple[str, bool]  # text, and whether it came from accepted drafts


class TokenText:
    """Turns an answer's tokens into pieces of text, each marked as draft or target's own."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._last = False

    def push(self, token_ids: Sequence[int], accepted: Sequence[bool]) -> list[Piece]:
        """The pieces that these tokens complete; a character made of several tokens counts as its last one's."""
        pieces: list[Piece] = []
        for token, is_draft in zip(token_ids, accepted, strict=True):
            self._detokenizer.push([token])
            self._add(pieces, self._detokenizer.take(), is_draft)
            self._last = is_draft
        return pieces

    def finish(self) -> list[Piece]:
        """What was held back as an incomplete character."""
        pieces: list[Piece] = []
        self._add(pieces, self._detokenizer.take(finished=True), self._last)
        return pieces

    @staticmethod
    def _add(pieces: list[Piece], text: str, is_draft: bool) -> None:
        if not text:
            return
        if pieces and pieces[-1][1] == is_draft:
            pieces[-1] = (pieces[-1][0] + text, is_draft)
        else:
            pieces.append((text, is_draft))


class WordWrap:
    """Breaks streamed text between words at `width` columns, indented; a word is written when it is complete.

    write prints one piece without a line end; measure gives the columns a text takes.
    """

    def __init__(
        self, width: int, indent: str, write: Callable[[str, bool], None], measure: Callable[[str], int]
    ) -> None:
        self.width = width
        self.indent = indent
        self.write = write
        self.measure = measure
        self._column = -1  # at the start of a line whose indent is not written yet
        self._word: list[Piece] = []

    def push(self, pieces: Sequence[Piece]) -> None:
        for text, is_draft in pieces:
            for character in text:
                if character == "\n":
                    self._flush()
                    self.write("\n", False)
                    self._column = -1
                elif character.isspace():
                    self._flush()
                    self._put(" " if character != "\t" else "    ", is_draft)
                elif self._word and self._word[-1][1] == is_draft:
                    self._word[-1] = (self._word[-1][0] + character, is_draft)
                else:
                    self._word.append((character, is_draft))

    def finish(self) -> None:
        """Write what is left and end the line."""
        self._flush()
        if self._column >= 0:
            self.write("\n", False)
            self._column = -1

    def _flush(self) -> None:
        length = sum(self.measure(text) for text, _ in self._word)
        if self._column > self.measure(self.indent) and self._column + length > self.width:
            self.write("\n", False)
            self._column = -1
        for text, is_draft in self._word:
            self._put(text, is_draft)
        self._word = []

    def _put(self, text: str, is_draft: bool) -> None:
        if self._column < 0:
            self.write(self.indent, False)
            self._column = self.measure(self.indent)
        if text.isspace() and self._column + len(text) > self.width:
            return  # the next word opens a new line
        self.write(text, is_draft)
        self._column += self.measure(text)
