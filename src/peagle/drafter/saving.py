"""Writing a head's folder in either layout, whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from peagle.drafter.config_keys import Layout
from peagle.drafter.head_folder import check_heads_config
from peagle.drafter.layouts import config_json
from peagle.drafter.model import Drafter
from peagle.errors import InputError
from peagle.work_folder import work_folder


def t2d_of(d2t: Tensor, vocab_size: int) -> Tensor:
    """The mask [V] of target ids that the draft vocabulary holds."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[torch.arange(len(d2t)) + d2t.cpu()] = True
    return t2d


def checkpoint_tensors(drafter: Drafter, layout: Layout, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """The tensors to write, under the layout's names, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in drafter.state_dict().items():
        if layout == "native":
            name = name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name
        tensor = tensor.detach().cpu()
        tensors[name] = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous().clone()
    if drafter.d2t is not None:
        tensors["t2d"] = t2d_of(drafter.d2t, drafter.config.vocab_size)
        if drafter.lm_head is None:
            # vLLM can share a target's whole LM head but not some of its rows, so those go into the file
            tensors["lm_head.weight"] = drafter.lm_head_weight().detach().cpu().to(dtype).contiguous().clone()
    return tensors


def write_files(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """The two files of a head, readable by everyone."""
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    os.chmod(folder / "model.safetensors", 0o644)  # safetensors writes 0600
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save_drafter(
    drafter: Drafter,
    path: str | os.PathLike[str],
    layout: Layout = "native",
    target_name: str = "",
    more: Callable[[Path], object] | None = None,
) -> Path:
    """Write a head's folder, whole or not at all: it is filled beside its place and moved there when complete.

    Files of the folder that are not the head's own (a model card) stay; one with another model's config.json or weights
    is refused. more: called with the folder that is being filled, to add files to it. Raises InputError.
    """
    final = Path(path).expanduser()
    if final.is_dir():
        check_heads_config(final)
    config = replace(drafter.config, dtype="bfloat16")
    if drafter.d2t is not None and drafter.lm_head is None and not drafter.bound:
        raise InputError("lm_head: a head with a reduced vocabulary and no LM head of its own, expected a bound target")
    with work_folder(final, f"output: {final} cannot be written") as work:
        write_files(work, checkpoint_tensors(drafter, layout), config_json(config, layout, target_name))
        if more is not None:
            more(work)
        if not final.is_dir():
            os.chmod(work, 0o755)
            work.rename(final)
        else:
            for file in sorted(work.iterdir(), reverse=True):
                os.replace(file, final / file.name)
            for stale in (*final.glob("*.safetensors"), *final.glob("*.safetensors.index.json")):
                if stale.name != "model.safetensors":
                    stale.unlink()
    return final
