"""Several answer folders of the same target as one."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from peagle.data.dataset import open_dataset
from peagle.data.metadata import check_same_target, read_metadata
from peagle.data.shards import Answer, ShardWriter, new_folder, write_counts, write_metadata
from peagle.errors import InputError


def merge_datasets(
    inputs: Sequence[Path],
    output: Path,
    rows: int = 4096,
    temperatures: Sequence[float] | None = None,
    max_tokens: int | None = None,
) -> int:
    """Write the examples of `inputs` into the new folder `output`; returns how many.

    The same prompt answered at the same temperature is taken once, from the first folder that has it. temperatures:
    only answers at one of these. max_tokens: stop at the first example that would make it more tokens, prompts
    included; examples come in the order of the folders, and those of a folder in their own. `output` is there only
    when it is complete.

    Raises:
        InputError: folders of different targets, a corrupt shard, an `output` that holds something, a full disk,
            nothing to keep.
    """
    if not inputs:
        raise InputError("merge: no input folder given")
    metadatas = [read_metadata(folder) for folder in inputs]
    for folder, metadata in zip(inputs, metadatas, strict=True):
        check_same_target(metadata, metadatas[0], str(folder), str(inputs[0]))
    generation = [run for metadata in metadatas for run in metadata.get("generation", [])]
    metadata = {**metadatas[0], "generation": generation}
    with new_folder(output) as work:
        count = _write_examples(inputs, work, rows, temperatures, max_tokens)
        write_metadata(work, metadata)
        write_counts(work)
    return count


def _write_examples(
    inputs: Sequence[Path], output: Path, rows: int, temperatures: Sequence[float] | None, max_tokens: int | None
) -> int:
    writer = ShardWriter(output, rows=rows, seconds=float("inf"))
    kept = None if temperatures is None else np.array(temperatures, dtype=np.float32)
    seen: set[tuple[str, float]] = set()
    room = float("inf") if max_tokens is None else max_tokens
    for folder in inputs:
        dataset = open_dataset(folder)
        for index, example in enumerate(dataset):
            key = (dataset.prompt_ids[index], float(dataset.temperatures[index]))
            if key in seen or (kept is not None and np.float32(key[1]) not in kept):
                continue
            room -= len(example.input_ids)
            if room < 0:
                break
            seen.add(key)
            writer.add(
                Answer(
                    input_ids=example.input_ids.tolist(),
                    answer_mask=example.answer_mask.tolist(),
                    source=dataset.sources[index],
                    temperature=key[1],
                    finish_reason=dataset.finish_reasons[index],
                    prompt_id=key[0],
                )
            )
        if room < 0:
            break
    if not seen:
        raise InputError(f"merge: no example is left (temperatures {temperatures}, max_tokens {max_tokens})")
    writer.flush()
    return len(seen)
