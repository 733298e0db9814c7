"""Token ids to text as they come: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# How many prompt tokens the first output token is decoded after: tokenizers that mark words with a leading space
# decode the same token differently at the start of a text.
CONTEXT_TOKENS = 5
INCOMPLETE = "\ufffd"
MOST_BYTES = 4


class Beginnings:
    """How much of a text's end could be the beginning of one of some strings. A character takes the same few operations
    a string, however long the strings are (Knuth, Morris and Pratt)."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = [(string, shorter_beginnings(string)) for string in strings]
        self._held = [0] * len(self._strings)

    @property
    def longest(self) -> int:
        """Characters at the end of all that has been fed."""
        return max(self._held, default=0)

    def feed(self, text: str) -> None:
        """More of the text."""
        for i, (string, shorter) in enumerate(self._strings):
            held = self._held[i]
            for character in text:
                while held and string[held] != character:
                    held = shorter[held - 1]
                held += string[held] == character
                if held == len(string):  # that is no beginning any more
                    held = shorter[held - 1]
            self._held[i] = held


def shorter_beginnings(string: str) -> list[int]:
    """For each beginning of a string, the length of the next shorter one that it ends with."""
    found, held = [0], 0
    for character in string[1:]:
        while held and string[held] != character:
            held = found[held - 1]
        held += string[held] == character
        found.append(held)
    return found


class Detokenizer:
    """One request's text. `push` token ids, `take` what may be shown; `text` is all that is decided so far."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        # Transformers' decode around it takes several times as long, and it is called for every token
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        self.stop = tuple(stop)
        self.skip_special_tokens = skip_special_tokens
        self.include_stop = include_stop
        self.text = ""
        self.stopped_by: str | None = None
        self._ids = list(prompt_token_ids[-CONTEXT_TOKENS:])
        # ids[_prefix:_read] have been turned into text already and are decoded again as context for what follows
        self._prefix = 0
        self._read = len(self._ids)
        self._sent = 0
        self._beginnings: Beginnings | None = None  # what only a stream needs
        self._fed = 0
        self._new = 0  # characters of the last push

    def _decode(self, ids: list[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(ids, skip_special_tokens=self.skip_special_tokens))
        return str(
            self.tokenizer.decode(ids, skip_special_tokens=self.skip_special_tokens, clean_up_tokenization_spaces=False)
        )

    def push(self, token_ids: Sequence[int], may_stop: bool = True) -> str | None:
        """Add token ids; return the stop string that they complete, if any, and cut the text there.

        may_stop False (min_tokens not reached): stop strings that end in this text do not count, now or later.
        """
        self._ids.extend(token_ids)
        self._new = 0
        known = self._decode(self._ids[self._prefix : self._read])
        # a character has four bytes at most: where the last one is incomplete, what stands before it is text already
        for end in range(len(self._ids), max(self._read, len(self._ids) - MOST_BYTES), -1):
            full = self._decode(self._ids[self._prefix : end])
            if len(full) > len(known) and not full.endswith(INCOMPLETE):
                self._grow(full[len(known) :], end)
                break
        return self._find_stop(may_stop)

    def finish(self) -> None:
        """No more tokens come: what was held back for being incomplete becomes text (as U+FFFD)."""
        if self.stopped_by is None and self._read < len(self._ids):
            known = self._decode(self._ids[self._prefix : self._read])
            self._grow(self._decode(self._ids[self._prefix :])[len(known) :], len(self._ids))

    def take(self, finished: bool = False) -> str:
        """The text since the last `take` that no later token can change."""
        if finished:
            self.finish()
        end = len(self.text) - (0 if finished else self._held_back())
        new = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def _held_back(self) -> int:
        """How many characters at the end could be the beginning of a stop string."""
        if not self.stop:
            return 0
        if self._beginnings is None:
            self._beginnings = Beginnings(self.stop)
        self._beginnings.feed(self.text[self._fed :])
        self._fed = len(self.text)
        return self._beginnings.longest

    def _grow(self, new: str, end: int) -> None:
        """Add the text of ids[_read:end]."""
        self._new += len(new)
        self.text += new
        self._prefix, self._read = self._read, end

    def _find_stop(self, may_stop: bool) -> str | None:
        if not self.stop or not may_stop:
            return None
        # it may have begun in text that was searched before, or that might not stop: where it ends counts
        before = len(self.text) - self._new
        found = [(at, s) for s in self.stop if (at := self.text.find(s, max(before - len(s) + 1, 0))) >= 0]
        if not found:
            return None
        at, self.stopped_by = min(found)
        self.text = self.text[: at + (len(self.stopped_by) if self.include_stop else 0)]
        return self.stopped_by
