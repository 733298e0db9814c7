"""A data set that is written, checked for evaluation prompts turn by turn."""

from collections.abc import Sequence

from peagle.data.chat_format import ChatFormat
from peagle.data.contamination import ContaminationGuard
from peagle.data.dataset import AnswerDataset
from peagle.errors import InputError


def check_dataset(dataset: AnswerDataset, eval_files: Sequence[str], chat: ChatFormat) -> int:
    """Check every user turn of a data set against evaluation files; returns how many turns were looked at.

    Raises:
        InputError: a turn is too close to an evaluation prompt; names the turn, its source, the rule and that prompt.
    """
    guard = ContaminationGuard.from_files(eval_files)
    seen: set[str] = set()
    for index, example in enumerate(dataset):
        for ids in user_turns(example.input_ids.tolist(), example.answer_mask.tolist()):
            text = chat.user_words(chat.tokenizer.decode(ids, skip_special_tokens=False))
            if text in seen:
                continue
            seen.add(text)
            match = guard.match(text)
            if match is not None:
                raise InputError(
                    f"{dataset.folders[0]}: example {index} of source {dataset.sources[index]!r} (prompt_id "
                    f"{dataset.prompt_ids[index]}) is too close to an evaluation prompt of {match.eval_source!r} by "
                    f"the rule {match.rule!r}: {text[:200]!r} against {match.eval_text[:200]!r}"
                )
    return len(seen)


def user_turns(input_ids: Sequence[int], answer_mask: Sequence[bool]) -> list[list[int]]:
    """Runs of tokens that are no answer tokens: the prompt and every later user turn, with the template around them."""
    runs: list[list[int]] = []
    previous = True
    for token, answered in zip(input_ids, answer_mask, strict=True):
        if not answered:
            if previous:
                runs.append([])
            runs[-1].append(token)
        previous = bool(answered)
    return runs
