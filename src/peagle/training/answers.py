"""The answers that a run learns from, with or without shards that are corrupt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from peagle.data.dataset import AnswerDataset, open_dataset, read_facts
from peagle.errors import InputError


class SoundAnswers(AnswerDataset):
    """A data set without its corrupt shards, as if they were not there; `corrupt` lists them."""

    @property
    def shards(self) -> list[Path]:
        return self._sound

    @shards.setter
    def shards(self, found: list[Path]) -> None:
        # assigned before the first shard is read, so that all that follows counts what is left
        self._sound: list[Path] = []
        self.corrupt: list[Path] = []
        for path in found:
            self._sound.append(path)
            try:
                self._shard(len(self._sound) - 1)
                read_facts(path)
            except InputError:
                self._cache.pop(len(self._sound) - 1, None)
                self.corrupt.append(self._sound.pop())
        if found and not self._sound:
            raise InputError(f"data: all {len(found)} shards are corrupt, {found[0]} to begin with")


def open_answers(
    folders: Sequence[str], on_corrupt: str, say: Callable[[str], None], with_states: bool = False
) -> AnswerDataset:
    """Open folders of answers; on_corrupt: "stop", or "skip" to name corrupt shards and leave out their documents.

    with_states: hidden states are read too; those of all documents do not fit what is left, so that is not advised.
    Raises InputError as `open_dataset` does.
    """
    if on_corrupt == "stop":
        try:
            return open_dataset(list(folders))
        except InputError as error:
            if "corrupt shard" not in str(error):
                raise
            advice = "or train without it (--on-corrupt skip)"
            if with_states:
                advice = "take it from a copy, or make it anew and then the hidden states, which are of all answers"
            raise InputError(f"{error}; {advice}") from error
    answers = SoundAnswers([Path(folder) for folder in folders])
    if answers.corrupt:
        say(f"data: corrupt and left out: {', '.join(map(str, answers.corrupt))}")
    return answers
