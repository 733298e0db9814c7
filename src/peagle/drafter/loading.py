"""Reading a head from a local folder or the Hub, in either layout, and refusing a broken one by key or tensor."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle.drafter.config import DrafterConfig, Kind
from peagle.drafter.layouts import IGNORED, module_name, parse_config
from peagle.drafter.model import Drafter, make_rotary
from peagle.drafter.tensor_checks import dtype_problems, twin_problems
from peagle.errors import InputError


def resolve_head(path: str | os.PathLike[str]) -> Path:
    """A head's folder: a local one as it is, otherwise a Hub id fetched into the Hub's cache."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") != 1:
        raise InputError(f"head: {str(path)!r} is not a folder, expected a head's folder or a Hub id like owner/name")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(path), allow_patterns=["*.json", "*.safetensors"]))
    except Exception as error:
        raise InputError(
            f"head: {str(path)!r} is no local folder and could not be had from the Hub ({error.__class__.__name__}: "
            f"{str(error).splitlines()[0]})"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a head's file. Raises InputError naming the file."""
    if not path.is_file():
        raise InputError(f"head: {path} is missing, expected a folder with config.json and *.safetensors")
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:  # numbers of thousands of digits are a ValueError, too
        raise InputError(f"head: {path} cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise InputError(f"head: {path} holds {type(content).__name__}, expected a JSON object")
    return content


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's safetensors files, on the CPU; a damaged file is named."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(
            f"head: no *.safetensors in {folder} (a pytorch_model.bin is not read: save it as safetensors)"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"head: {file} cannot be read, it may be truncated or damaged ({error})") from error
    return tensors


def read_config(folder: Path) -> DrafterConfig:
    """The config of a head in either layout, without its tensors (own embeddings and LM head are told by those)."""
    path = folder / "config.json"
    return parse_config(read_json(path))


def load_drafter(
    path: str | os.PathLike[str],
    kind: Kind | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Drafter:
    """Load a head from a folder or a Hub id. `kind`, when given, must be the head's; `dtype` None keeps the file's.

    Raises InputError naming the key or tensor and what was expected. The caller still has to `bind` the target.
    """
    folder = resolve_head(path)
    config = read_config(folder)
    if kind is not None and config.kind != kind:
        wanted = "parallel_drafting" if kind == "p-eagle" else "no parallel_drafting"
        raise InputError(f"head: {path} is of kind {config.kind}, but the speculative config says {wanted} ({kind})")
    stored = read_tensors(folder)
    for problem in twin_problems(stored):
        raise InputError(problem)
    stored = {module_name(name): tensor for name, tensor in stored.items()}
    tensors = {name: tensor for name, tensor in stored.items() if not IGNORED.search(name)}
    if config.kind == "p-eagle" and "mask_hidden" not in tensors:
        raise InputError(f"mask_hidden: missing in {folder}, expected a tensor of {config.aux_size} values")
    if "mask_hidden" in tensors and config.kind == "eagle3":
        raise InputError(
            f"mask_hidden: present in {folder}, but its config names no mask token (ptd_token_id or mask_token_id)"
        )
    if config.reduced_vocab and "d2t" not in tensors:
        raise InputError(f"d2t: missing in {folder}, expected it because draft_vocab_size is {config.draft_vocab_size}")
    weight_dtype = tensors["fc.weight"].dtype if "fc.weight" in tensors else torch.bfloat16
    config = replace(
        config,
        own_embed_tokens="embed_tokens.weight" in tensors,
        own_lm_head="lm_head.weight" in tensors,
        dtype=str(weight_dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        drafter = Drafter(config)
    expected = drafter.state_dict()
    dtypes = {name: str(tensor.dtype).removeprefix("torch.") for name, tensor in stored.items()}
    for problem in dtype_problems(dtypes, expected):
        raise InputError(problem)
    if not config.reduced_vocab and tensors.pop("d2t", torch.zeros(1)).any():
        raise InputError(
            f"d2t: maps to other ids, but draft_vocab_size is the whole vocabulary ({config.vocab_size}), expected none"
        )
    for name, tensor in expected.items():
        if name.endswith("o_proj.bias") and name not in tensors:  # attention_bias on q, k and v only
            tensors[name] = torch.zeros(tensor.shape, dtype=weight_dtype)
        if name not in tensors:
            raise InputError(f"{name}: missing in {folder}, expected shape {list(tensor.shape)}")
        if name == "mask_hidden" and tensors[name].numel() == tensor.numel():
            tensors[name] = tensors[name].reshape(tensor.shape)
        if tensors[name].shape != tensor.shape:
            raise InputError(f"{name}: shape {list(tensors[name].shape)}, expected {list(tensor.shape)}")
    unknown = sorted(set(tensors) - set(expected))
    if unknown:
        raise InputError(f"{unknown[0]}: not a tensor of this kind of head ({len(unknown)} such in {folder})")
    if config.reduced_vocab:
        check_d2t(tensors["d2t"], config.vocab_size)
        tensors["d2t"] = tensors["d2t"].to(torch.int64)
    dtype = dtype or weight_dtype
    drafter = drafter.to_empty(device=device)
    drafter.load_state_dict({n: t.to(dtype) if t.is_floating_point() else t for n, t in tensors.items()}, assign=True)
    drafter.to(device)
    drafter.rotary = make_rotary(config).to(device)  # its buffers are not in the file
    return drafter.eval()


def check_d2t(d2t: Tensor, vocab_size: int) -> None:
    """Refuse a mapping that leaves the target's vocabulary or names a token twice."""
    ids = torch.arange(len(d2t)) + d2t.to("cpu", torch.int64)
    bad = ((ids < 0) | (ids >= vocab_size)).nonzero()
    if len(bad):
        i = int(bad[0])
        raise InputError(f"d2t[{i}]: maps to target id {int(ids[i])}, expected 0 to {vocab_size - 1}")
    if len(ids.unique()) != len(ids):
        raise InputError("d2t: two draft ids map to the same target id, expected each target id at most once")
