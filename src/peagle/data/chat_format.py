"""What a chat template puts around turns, found by rendering it, so that no template needs code of its own."""

import warnings
from collections.abc import Sequence
from typing import Any

from peagle.errors import InputError

_USER, _ANSWER, _LATER = "FIRSTUSERTURN", "ASSISTANTANSWER", "SECONDUSERTURN"


class ChatFormat:
    """The fixed parts of a tokenizer's chat template.

    Attributes:
        opening: text before the first user turn's words (a default system message included).
        close_user: text between a user turn's words and the answer's.
        next_user: text between an answer's words and the next user turn's, the answer's end marker included;
            None for a template that knows one turn only.
        end_of_user_id: token that ends a user turn, or None if the template marks the end by plain text.
        end_of_user_text: that token's text, or the plain text.
        end_of_answer_id: token that ends an answer: the template's if the target stops on it, else the only one on
            which it stops, else the tokenizer's; None if none of these is known.
    """

    def __init__(self, tokenizer: Any, end_ids: Sequence[int] = (), template_kwargs: dict[str, Any] | None = None):
        """
        Args:
            end_ids: token ids on which the target stops generating.
            template_kwargs: passed to the template, e.g. {"enable_thinking": False}.

        Raises:
            InputError: no chat template, or one that does not show a user turn's words.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise InputError("the target's tokenizer has no chat template; prompts are chat turns and need one")
        self.tokenizer = tokenizer
        self.end_ids = frozenset(int(token) for token in end_ids)
        self._kwargs = dict(template_kwargs or {})
        user = {"role": "user", "content": _USER}
        self.opening, self.close_user = self._around(self._render([user], answer=True), _USER)
        _, after_user = self._around(self._render([user], answer=False), _USER)
        self.next_user: str | None = None
        turns = [user, {"role": "assistant", "content": _ANSWER}, {"role": "user", "content": _LATER}]
        try:
            between = self._render(turns, answer=False)
        except Exception:  # a template may refuse a second turn by any Jinja error; then there is no next turn
            between = ""
        if _ANSWER in between and _LATER in between:
            self.next_user = between.rpartition(_ANSWER)[2].partition(_LATER)[0]
        closing = after_user or self.close_user
        self.end_of_user_id = self._leading_special(closing)
        self.end_of_user_text = (
            closing.strip() if self.end_of_user_id is None else tokenizer.decode([self.end_of_user_id])
        )

    @property
    def end_of_answer_id(self) -> int | None:
        token = self._leading_special(self.next_user or "")
        if token in self.end_ids:
            return token
        if len(self.end_ids) == 1:
            return next(iter(self.end_ids))
        token = getattr(self.tokenizer, "eos_token_id", None)
        return token if token in self.end_ids else None

    def first_turn(self, turn: str, system: str | None = None) -> list[int]:
        """Token ids of a conversation's opening with its first user turn, up to where the answer begins."""
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": turn})
        return self.encode(self._render(messages, answer=True))

    def later_turn(self, turn: str, answer: Sequence[int]) -> list[int]:
        """Token ids to append after `answer` (as generated): rest of its closing, the user turn, the next opening."""
        return self.encode(self._next_user_after(answer) + turn + self.close_user)

    def first_opening(self, words: str = "") -> list[int]:
        """Token ids after which the target writes a user's first turn that begins with `words`."""
        return self.encode(self.opening + words.rstrip(" "))

    def later_opening(self, answer: Sequence[int]) -> list[int]:
        """Token ids to append after `answer` so that the target writes the next user turn."""
        return self.encode(self._next_user_after(answer))

    def encode(self, text: str) -> list[int]:
        """Token ids of template text: special tokens are read as such, none is added."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def user_words(self, text: str) -> str:
        """A user turn's words out of decoded token ids (special tokens shown) with the template still around them."""
        if text.startswith(self.opening):
            text = text[len(self.opening) :]
        elif self.next_user:
            header = self._without_end(self.next_user).lstrip()
            text = text.rpartition(header)[2] if header else text
        return text.removesuffix(self.close_user)

    def _next_user_after(self, answer: Sequence[int]) -> str:
        if self.next_user is None:
            raise InputError("the target's chat template cannot render a second user turn")
        ended = bool(answer) and answer[-1] in self.end_ids
        return self._without_end(self.next_user) if ended else self.next_user

    def _without_end(self, text: str) -> str:
        """`text` without the end marker that begins it: a generated answer has brought its own."""
        token = self._leading_special(text)
        if token is None:
            return text
        return text.lstrip().removeprefix(self.tokenizer.decode([token]))

    def _leading_special(self, text: str) -> int | None:
        ids = self.encode(text.lstrip())
        if not ids:
            return None
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).get(ids[0])
        special = ids[0] in self.tokenizer.all_special_ids or (added is not None and added.special)
        return ids[0] if special or ids[0] in self.end_ids else None

    def _render(self, messages: list[dict[str, str]], answer: bool) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer, **self._kwargs
            )

    @staticmethod
    def _around(text: str, words: str) -> tuple[str, str]:
        before, found, after = text.rpartition(words)
        if not found:
            raise InputError("the target's chat template does not show the user's words; cannot build prompts with it")
        return before, after
