"""Which request follows which: a workload's conversations, turn by turn, for one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peagle.bench.conversations import Chat, Turn
from peagle.bench.records import Record
from peagle.bench.workloads import Workload
from peagle.errors import InputError

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Question:
    """One request: token_ids for engines that take them, messages for a server that applies its own template."""

    conversation: int
    turn: int
    max_tokens: int
    token_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None


class Questions:
    """The requests of a workload. With `chat`, prompts are token ids by the target's chat template, the same for every
    engine; without it they are messages. max_model_len None: not known, nothing is cut. first_turns leaves all later
    turns out, uncounted."""

    def __init__(
        self,
        workload: Workload,
        chat: Chat | None,
        max_tokens: int,
        max_model_len: int | None,
        first_turns: bool = False,
    ) -> None:
        self.workload = workload
        self.first_turns = first_turns
        self.chat = chat
        self.max_tokens = workload.output_len or max_tokens
        self.max_model_len = max_model_len
        self.num_skipped = 0

    def __len__(self) -> int:
        """Conversations."""
        return len(self.workload)

    def check_lengths(self) -> None:
        """Refuse a first turn that the model cannot hold, before anything is measured."""
        needed = self.workload.output_len or 1
        for index in range(len(self)):
            ids = self._first_ids(index)
            if ids is not None and self._room(ids) < needed:
                raise InputError(
                    f"workload {self.workload.name}: prompt {index + 1} has {len(ids)} tokens and its answer needs "
                    f"{needed}, expected at most {self.max_model_len} together (max_model_len)"
                )

    def first(self, conversation: int) -> Question:
        """A conversation's opening."""
        ids = self._first_ids(conversation)
        if ids is not None:
            return Question(conversation, 0, min(self.max_tokens, self._room(ids)), token_ids=ids)
        prompt = self.workload.prompts[conversation]
        system = [{"role": "system", "content": prompt.system}] if prompt.system else []
        messages = [*system, {"role": "user", "content": prompt.turns[0]}]
        return Question(conversation, 0, self.max_tokens, messages=messages)

    def after(self, question: Question, record: Record) -> Question | None:
        """The next turn, which sees the answer; None at the end, after a failure, or where it would not fit."""
        if not self.workload.prompts or self.first_turns:
            return None
        prompt, turn = self.workload.prompts[question.conversation], question.turn + 1
        left = len(prompt.turns) - turn
        if left == 0:
            return None
        following = None
        if record.failure is None:
            following = self._later_ids(question, record) if self.chat is not None else self._messages(question, record)
        if following is None:
            self.num_skipped += left
        return following

    def _later_ids(self, question: Question, record: Record) -> Question | None:
        assert self.chat is not None
        assert question.token_ids is not None
        prompt, turn = self.workload.prompts[question.conversation], question.turn + 1
        if turn >= self.chat.num_turns(prompt):
            return None
        before = Turn(list(question.token_ids), self._answer_ids(record))
        ids = self.chat.later(prompt, turn, before)
        room = self._room(ids)
        if room < 1:
            return None
        return Question(question.conversation, turn, min(self.max_tokens, room), token_ids=ids)

    def _answer_ids(self, record: Record) -> list[int]:
        """The answer as generated; from its text where the server told no ids."""
        assert self.chat is not None
        if record.token_ids is not None:
            return record.token_ids
        return list(self.chat.tokenizer.encode(record.text, add_special_tokens=False))

    def _messages(self, question: Question, record: Record) -> Question:
        assert question.messages is not None
        turns = self.workload.prompts[question.conversation].turns
        messages = [
            *question.messages,
            {"role": "assistant", "content": record.text},
            {"role": "user", "content": turns[question.turn + 1]},
        ]
        return Question(question.conversation, question.turn + 1, self.max_tokens, messages=messages)

    def _first_ids(self, conversation: int) -> Sequence[int] | None:
        if self.workload.token_ids:
            return self.workload.token_ids[conversation]
        return self.chat.first(self.workload.prompts[conversation]) if self.chat is not None else None

    def _room(self, ids: Sequence[int]) -> int:
        return self.max_tokens if self.max_model_len is None else self.max_model_len - len(ids)
