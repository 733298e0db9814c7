"""Long conversations made of short ones, so that a head meets long contexts in training."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

from peagle.data.dataset import AnswerDataset, open_dataset
from peagle.data.metadata import read_metadata
from peagle.data.shards import Answer, ShardWriter, new_folder, write_counts, write_metadata
from peagle.errors import InputError

SOURCE = "joined"


def join_conversations(
    inputs: Sequence[Path], output: Path, tokens: int, share: float = 1.0, seed: int = 0, rows: int = 4096
) -> tuple[int, int]:
    """Write the conversations of `inputs` into the new folder `output`, some of them one behind another as one of up to
    `tokens` tokens; returns how many conversations there are now, and how many of them are joined.

    The target reads a joined one as a single conversation when its states are made, so what it teaches holds for that
    context; the answers were written without it. Only answers of one temperature are joined. share: of all tokens, to
    be in joined conversations; the rest stays as it is. Which ones is drawn with `seed`. `output` is there only when it
    is complete.

    Raises:
        InputError: a share or number of tokens out of range, an `output` that holds something, folders of different
            targets, a corrupt shard, a full disk.
    """
    if not 0 < share <= 1:
        raise InputError(f"share: got {share}, expected more than 0 and at most 1")
    if tokens < 2:
        raise InputError(f"tokens: got {tokens}, expected at least 2")
    dataset = open_dataset(list(inputs))
    how = {"joined": {"tokens": tokens, "share": share, "seed": seed}}
    generation = [run for folder in inputs for run in read_metadata(folder).get("generation", [])]
    with new_folder(output) as work:
        counts = _write_joined(dataset, work, tokens, share, seed, rows)
        write_metadata(work, {**dataset.metadata, "generation": [*generation, how]})
        write_counts(work)
    return counts


def _write_joined(
    dataset: AnswerDataset, output: Path, tokens: int, share: float, seed: int, rows: int
) -> tuple[int, int]:
    order = list(range(len(dataset)))
    random.Random(seed).shuffle(order)
    writer = ShardWriter(output, rows=rows, seconds=float("inf"))
    room = share * float(dataset.lengths.sum())
    open_groups: dict[float, list[int]] = {}
    lengths: dict[float, int] = {}
    count = joined = 0

    def write(group: list[int]) -> None:
        nonlocal count, joined
        count, joined = count + 1, joined + (len(group) > 1)
        writer.add(one_answer(dataset, group))

    for index in order:
        length, temperature = int(dataset.lengths[index]), float(dataset.temperatures[index])
        if room <= 0 or length >= tokens:
            write([index])
            continue
        room -= length
        if lengths.get(temperature, 0) + length > tokens:
            write(open_groups.pop(temperature))
            lengths[temperature] = 0
        open_groups.setdefault(temperature, []).append(index)
        lengths[temperature] = lengths.get(temperature, 0) + length
    for group in open_groups.values():
        write(group)
    writer.flush()
    return count, joined


def one_answer(dataset: AnswerDataset, group: Sequence[int]) -> Answer:
    """The examples of a group as one row; a group of one as it was."""
    examples = [dataset[index] for index in group]
    names = [dataset.prompt_ids[index] for index in group]
    alone = len(group) == 1
    return Answer(
        input_ids=[token for example in examples for token in example.input_ids.tolist()],
        answer_mask=[bit for example in examples for bit in example.answer_mask.tolist()],
        source=dataset.sources[group[0]] if alone else SOURCE,
        temperature=float(dataset.temperatures[group[0]]),
        finish_reason=dataset.finish_reasons[group[-1]],
        prompt_id=names[0] if alone else hashlib.sha256("\0".join(names).encode()).hexdigest()[:16],
    )
