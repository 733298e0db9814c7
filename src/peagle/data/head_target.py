"""Whether answers are in the token ids that a head drafts."""

from __future__ import annotations

from pathlib import Path

from peagle.data.dataset import AnswerDataset
from peagle.drafter.facts import named_target
from peagle.drafter.loading import read_json
from peagle.errors import InputError
from peagle.target.text import read_target_text


def check_head_target(head: Path, dataset: AnswerDataset, target: str | None = None) -> None:
    """Refuse answers in another tokenizer's ids than the head's target's; nothing is loaded where both name the same.

    Two tokenizers may have as many tokens, so a vocabulary's size does not tell.

    Args:
        head: its folder.
        target: where to take the tokenizer from; None for the target that the head names.

    Raises:
        InputError: another tokenizer, or none to be found: the head names no target and none is given.
    """
    name = target or named_target(read_json(head / "config.json"))
    if not name:
        raise InputError(f"HEAD: {head} does not name its target, expected --target to compare tokenizers with")
    if name == dataset.metadata["target"]["name"]:
        return
    try:
        tokenizer = read_target_text(name).tokenizer
    except InputError as error:
        raise InputError(f"HEAD: its target cannot be read, give another place with --target ({error})") from error
    if tokenizer is None:
        raise InputError(f"HEAD: its target {name} has no tokenizer, expected --target with one")
    dataset.check_target(tokenizer)
