"""Reading cached hidden states (`states_plan.py`), of shards whose checksums were looked at."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.data.shards import replacing
from peagle.errors import InputError
from peagle.training.distributed import ALONE, World
from peagle.training.fp8 import from_fp8
from peagle.training.identity import same_target
from peagle.training.state_cache import Placed
from peagle.training.states_plan import file_digest, is_finished, read_plan, written_digest

VERIFIED_FILE = "verified.json"


class StoredDocument(NamedTuple):
    """A document's aux [length, S H], hidden [length, H] and, for fp8, scale [length, S + 1], on the host."""

    aux: Tensor
    hidden: Tensor
    scale: Tensor | None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self if tensor is not None)

    def pin(self) -> StoredDocument:
        scale = None if self.scale is None else self.scale.pin_memory()
        return StoredDocument(self.aux.pin_memory(), self.hidden.pin_memory(), scale)


class StoredStates:
    """Reader of a folder of states: slices of memory-mapped shards, nothing else in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.plan = folder, read_plan(folder)
        self._place: dict[int, tuple[int, int, int]] = {}  # document -> (shard, first row, rows)
        for shard, (documents, lengths) in enumerate(zip(self.plan.shards, self.plan.lengths, strict=True)):
            first = 0
            for document, length in zip(documents, lengths, strict=True):
                self._place[document] = (shard, first, length)
                first += length
        self._open: dict[int, Any] = {}

    def check(
        self,
        *,
        target: str,
        data: str,
        aux_layer_ids: Sequence[int],
        documents: np.ndarray,
        lengths: np.ndarray,
        left_out: Sequence[Path] = (),
    ) -> None:
        """Refuse states of another target or other data (fingerprints), of other layers, or of documents [D] that are
        cut shorter than the wanted lengths [D]. left_out: corrupt shards of answers that the data is without."""
        plan = self.plan
        wrong = []
        if not same_target(plan.target_fingerprint, target):
            wrong.append(f"made with the target {plan.target} ({plan.target_fingerprint}), this one is {target}")
        if plan.data != data:
            without = f", without its corrupt shards {', '.join(map(str, left_out))}" if left_out else ""
            wrong.append(f"made of data {plan.data[:16]}, this is {data[:16]}{without}")
        if plan.aux_layer_ids != tuple(aux_layer_ids):
            wrong.append(
                f"holds the auxiliary layers {', '.join(map(str, plan.aux_layer_ids))}, the head reads "
                f"{', '.join(map(str, aux_layer_ids))} (--aux-layer-ids)"
            )
        stored = np.array([self._place.get(document, (0, 0, 0))[2] for document in documents.tolist()])
        if not wrong and (stored < lengths).any():
            wrong.append(
                f"documents are cut at {plan.max_length} tokens, up to {int(lengths.max())} are wanted (--pack-length)"
            )
        if wrong:
            raise InputError(f"hidden_states: {self.folder} does not fit: {'; '.join(wrong)}")

    def check_finished(self) -> None:
        """Refuse a folder that is still to be filled."""
        shards = self.plan.shards
        if missing := [i for i in range(len(shards)) if not is_finished(self.plan.file(self.folder, i))]:
            raise InputError(
                f"hidden_states: {len(missing)} of {len(shards)} shards in {self.folder} are not written yet; run "
                "`peagle data hidden-states` again with the same arguments, it goes on"
            )

    def corrupt_shards(self, world: World = ALONE) -> list[int]:
        """Shards whose contents are not what was written. Those that were right before and are untouched are not read
        again; the others are read by all processes in shares (each calls this), and noted down one by one."""
        corrupt = torch.zeros(len(self.plan.shards), dtype=torch.int64)
        known = self._verified()
        with world.patient() as add_up:
            for i in range(world.rank, len(corrupt), world.size):
                corrupt[i] = not self._is_right(i, known)
            add_up(corrupt)
        notes = sorted(self.folder.glob(f"{VERIFIED_FILE}.*"))
        if world.first and notes:  # one note of all shards again
            with suppress(InputError, OSError):
                with replacing(self.folder / VERIFIED_FILE) as work:
                    work.write_text(json.dumps(self._verified()))
                for note in notes:
                    note.unlink()
        return corrupt.nonzero().flatten().tolist()

    def _verified(self) -> dict[str, Any]:
        """By file name, size, time and digest of the shards that were right when they were read."""
        known: dict[str, Any] = {}
        for note in sorted(self.folder.glob(f"{VERIFIED_FILE}*")):
            with suppress(OSError, ValueError):
                for line in note.read_text().splitlines():
                    known |= json.loads(line)
        return known

    def _is_right(self, shard: int, known: Mapping[str, Any]) -> bool:
        file = self.plan.file(self.folder, shard)
        facts = [file.stat().st_size, file.stat().st_mtime_ns, written_digest(file)]
        if known.get(file.name) == facts:
            return True
        if file_digest(file) != facts[2]:
            return False
        # a file a process, so that none writes another's; a folder that cannot be written is read every time
        with (
            suppress(OSError),
            open(self.folder / f"{VERIFIED_FILE}.{socket.gethostname()}-{os.getpid()}", "a") as note,
        ):
            note.write(json.dumps({file.name: facts}) + "\n")
        return True

    def documents(self, shards: Sequence[int]) -> list[int]:
        return [document for shard in shards for document in self.plan.shards[shard]]

    def document(self, document: int, length: int) -> StoredDocument:
        """The states of a document's first `length` tokens. Raises InputError when they cannot be read."""
        shard, first, _ = self._place[document]
        file = self.plan.file(self.folder, shard)
        try:
            if shard not in self._open:
                self._open[shard] = safe_open(file, "pt")
            opened, rows = self._open[shard], slice(first, first + length)
            scale = opened.get_slice("scale")[rows] if self.plan.dtype == "fp8" else None
            return StoredDocument(opened.get_slice("aux")[rows], opened.get_slice("hidden")[rows], scale)
        except (SafetensorError, OSError) as error:
            raise InputError(f"hidden_states: {file} cannot be read ({error})") from error

    def read(
        self,
        placed: Sequence[Placed],
        positions: int,
        dtype: torch.dtype,
        hidden_dtype: torch.dtype,
        device: torch.device,
        take: Callable[[int], StoredDocument] | None = None,
        into: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """States as `encode_packs` gives them: aux [positions, S H] in `dtype`, hidden [positions, H] in
        `hidden_dtype`, zeros in padding. placed: documents in packs laid end to end. take: gives those that were read
        ahead. into: such states of other documents, which these are added to in place."""
        layers = len(self.plan.aux_layer_ids)
        if into is None:
            width = self.plan.hidden_size
            aux = torch.zeros(positions, layers * width, dtype=dtype, device=device)
            into = aux, torch.zeros(positions, width, dtype=hidden_dtype, device=device)
        aux, hidden = into

        def move(tensor: Tensor) -> Tensor:
            # pinned, so that the host need not wait until the device has come that far
            if device.type != "cuda":
                return tensor
            return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)

        for item in placed:
            states = self.document(item.document, item.length) if take is None else take(item.document)
            span = slice(item.start, item.start + item.length)
            if states.scale is None:
                aux[span], hidden[span] = move(states.aux), move(states.hidden)
            else:
                scale = move(states.scale)
                aux[span] = from_fp8(move(states.aux), scale[:, :layers], dtype)
                hidden[span] = from_fp8(move(states.hidden), scale[:, layers:], hidden_dtype)
        return aux, hidden


def open_states(
    folder: Path, on_corrupt: str, world: World, say: Callable[[str], None]
) -> tuple[StoredStates, list[int]]:
    """A folder of states whose checksums were looked at, and the documents of corrupt shards, which are to be left out.

    Raises InputError for corrupt shards unless `on_corrupt` is "skip", naming them.
    """
    states = StoredStates(folder)
    states.check_finished()
    corrupt = states.corrupt_shards(world)
    if not corrupt:
        return states, []
    names = ", ".join(states.plan.file(folder, i).name for i in corrupt)
    documents = states.documents(corrupt)
    if on_corrupt == "stop":
        raise InputError(
            f"hidden_states: corrupt in {folder}: {names}, with {len(documents)} documents; delete them and run "
            "`peagle data hidden-states` again, or train without them (--on-corrupt skip)"
        )
    say(f"target states: corrupt and left out: {names}, with {len(documents)} documents")
    return states, documents
