"""Writing a data set's hidden states once, so that training need not run the target again (`states.py`)."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from peagle.data.shards import replacing
from peagle.errors import InputError
from peagle.target.model import Target
from peagle.training.encode import call_overhead, encode_packs
from peagle.training.encode_groups import group_spans
from peagle.training.fp8 import to_fp8
from peagle.training.identity import full_identity, same_target
from peagle.training.memory import fits
from peagle.training.scan import Answers, scan_answers
from peagle.training.states_plan import (
    PLAN_FILE,
    StatesPlan,
    StoredDtype,
    checksum_file,
    file_digest,
    is_finished,
    read_plan,
)
from peagle.work_folder import remove_stale

# documents [D] as token ids -> aux [T, S H] and hidden [T, H] of all of them, one after another
Encode = Callable[[Sequence[np.ndarray]], tuple[Tensor, Tensor]]


def plan_states(
    target: Target,
    answers: Answers,
    dtype: StoredDtype,
    aux_layer_ids: Sequence[int] | None = None,
    max_length: int | None = None,
    shard_bytes: int = 2 << 30,
    computed_in: str | None = None,
) -> StatesPlan:
    """Which documents go where. Documents that cannot train (no answer token) are left out.

    max_length: cut longer documents; None: none. A shard takes documents up to `shard_bytes`, and at least one.
    computed_in: what the states are computed in, by default the target's dtype.
    """
    ids = tuple(aux_layer_ids or target.default_aux_layer_ids())
    target.check_aux_layer_ids(ids)
    longest = max_length or max(len(answers[i].input_ids) for i in range(len(answers)))
    scan = scan_answers(answers, longest, target.vocab_size)
    plan = StatesPlan(
        target=target.name_or_path,
        target_fingerprint=full_identity(target),
        data=answers.fingerprint,
        aux_layer_ids=ids,
        hidden_size=target.hidden_size,
        dtype=dtype,
        computed_in=computed_in or str(target.dtype).removeprefix("torch."),
        max_length=longest,
        shards=(),
        lengths=(),
    )
    shards: list[list[int]] = []
    lengths: list[list[int]] = []
    room = 0
    for document, length in zip(scan.documents.tolist(), scan.lengths.tolist(), strict=True):
        size = length * plan.token_bytes
        if not shards or size > room:
            shards.append([])
            lengths.append([])
            room = shard_bytes
        shards[-1].append(document)
        lengths[-1].append(length)
        room -= size
    return replace(plan, shards=tuple(map(tuple, shards)), lengths=tuple(map(tuple, lengths)))


def write_states(
    plan: StatesPlan,
    answers: Answers,
    encoder: Callable[[], Encode],
    folder: Path,
    say: Callable[[str], None],
    dry_run: bool = False,
) -> int:
    """Write the shards that are not there yet; returns their number. The size is said first.

    encoder: called once, when there is something to write and room for it.

    Raises:
        InputError: the disk has too little room, or the folder holds other states (each difference is named).
    """
    todo = [i for i in range(len(plan.shards)) if not is_finished(plan.file(folder, i))]
    left = sum(sum(plan.lengths[i]) for i in todo) * plan.token_bytes
    gib = 2**30
    say(
        f"{plan.tokens:,} tokens of {sum(map(len, plan.shards)):,} documents, {plan.token_bytes:,} bytes a token "
        f"({plan.dtype}, layers {', '.join(map(str, plan.aux_layer_ids))} and the last): "
        f"{plan.tokens * plan.token_bytes / gib:.2f} GiB in {len(plan.shards)} shards"
        + (f"; {left / gib:.2f} GiB in {len(todo)} shards to write" if len(todo) < len(plan.shards) else "")
    )
    _check_same(plan, folder)
    if not dry_run:
        remove_stale(folder)  # before its disk is looked at: a killed run's shard takes gigabytes
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    if left > free:
        raise InputError(
            f"output: {folder} needs {left / gib:.2f} GiB more and its disk has {free / gib:.2f} GiB free; use fp8 for "
            "half of the size, a lower --max-length, or another disk"
        )
    if dry_run:
        return 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output: {folder} cannot be created ({error.strerror or error})") from error
    with replacing(folder / PLAN_FILE) as work:
        work.write_text(plan.to_json())
    if not todo:
        return 0
    encode = encoder()
    with tqdm(total=sum(sum(plan.lengths[i]) for i in todo), unit="token", unit_scale=True, dynamic_ncols=True) as bar:
        for i in todo:
            documents = [answers[d].input_ids[:n] for d, n in zip(plan.shards[i], plan.lengths[i], strict=True)]
            _write_shard(plan, plan.file(folder, i), *encode(documents))
            bar.update(sum(plan.lengths[i]))
    return len(todo)


def target_encoder(target: Target, aux_layer_ids: Sequence[int]) -> Encode:
    """Documents through the target in this process, short ones of similar length together."""

    def encode(documents: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
        starts = np.concatenate([[0], np.cumsum([len(ids) for ids in documents])])
        spans = [(ids, int(start)) for ids, start in zip(documents, starts[:-1], strict=True)]
        cuda = target.device.type == "cuda"
        # as training makes them, so that its sums are the same where the documents are
        groups = group_spans(spans, 32768 if cuda else 4096, call_overhead(target) if cuda else 64, 64 if cuda else 1)
        groups = [group.to(target.device) for group in groups]
        with fits("max_length: the target's pass over one document", "lower --max-length"):
            return encode_packs(target, groups, int(starts[-1]), aux_layer_ids, target.dtype)

    return encode


def _write_shard(plan: StatesPlan, file: Path, aux: Tensor, hidden: Tensor) -> None:
    tensors: dict[str, Tensor] = {}
    if plan.dtype == "fp8":
        aux, aux_scale = to_fp8(aux, len(plan.aux_layer_ids))
        hidden, hidden_scale = to_fp8(hidden, 1)
        tensors["scale"] = torch.cat((aux_scale, hidden_scale), dim=1).cpu()
    else:
        aux, hidden = aux.bfloat16(), hidden.bfloat16()
    tensors |= {"aux": aux.cpu().contiguous(), "hidden": hidden.cpu().contiguous()}
    checksum_file(file).unlink(missing_ok=True)
    with replacing(file) as work:
        try:
            save_file(tensors, work)
        except SafetensorError as error:  # how safetensors reports a full disk
            raise InputError(f"output: {file} cannot be written ({error})") from error
        os.chmod(work, 0o644)  # safetensors writes 0600
        digest = file_digest(work)
    with replacing(checksum_file(file)) as work:
        work.write_text(f"{digest}  {file.name}\n")


def _check_same(plan: StatesPlan, folder: Path) -> None:
    """Refuse to mix states that were made differently."""
    if not (folder / PLAN_FILE).exists():
        return
    before = read_plan(folder)
    names = ("target_fingerprint", "data", "aux_layer_ids", "dtype", "computed_in", "max_length", "shards", "lengths")
    changed = []
    for name in names:
        old, new = getattr(before, name), getattr(plan, name)
        if old != new and not (name == "target_fingerprint" and same_target(old, new)):
            shown = name in ("shards", "lengths")
            changed.append(f"{name}: {len(old)} -> {len(new)} shards" if shown else f"{name}: {old} -> {new}")
    if changed:
        raise InputError(
            f"output: {folder} holds other hidden states ({'; '.join(changed)}); use another folder or the old settings"
        )
