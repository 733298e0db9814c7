"""Token ids to text as they come: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

# How many prompt tokens the first output token is decoded after: tokenizers that mark words with a leading space
# decode the same token differently at the start of a text.
CONTEXT_TOKENS = 5
INCOMPLETE = "\ufffd"
MOST_BYTES = 4


def held_back(text: str, stop: Sequence[str]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    longest = 0
    for string in stop:
        for n in range(min(len(string) - 1, len(text)), longest, -1):
            if text.endswith(string[:n]):
                longest = n
                break
    return longest


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
        self._searched = 0

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
        end = len(self.text) - (0 if finished else held_back(self.text, self.stop))
        new = self.text[self._sent : end]
        self._sent = max(self._sent, end)
        return new

    def _grow(self, new: str, end: int) -> None:
        """Add the text of ids[_read:end]."""
        self.text += new
        self._prefix, self._read = self._read, end

    def _find_stop(self, may_stop: bool) -> str | None:
        if not self.stop:
            return None
        if may_stop:
            # a stop string may have begun in text that was searched before, but not in text that may not stop
            found = [(at, s) for s in self.stop if (at := self.text.find(s, self._searched)) >= 0]
            if found:
                at, self.stopped_by = min(found)
                self.text = self.text[: at + (len(self.stopped_by) if self.include_stop else 0)]
                return self.stopped_by
            self._searched = max(self._searched, len(self.text) - max(map(len, self.stop)) + 1)
        else:
            self._searched = len(self.text)
        return None
