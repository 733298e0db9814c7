"""What a head's folder says about itself, from `config.json` and the headers of its safetensors files.

No weights are read, so this takes milliseconds for a head of any size, and it goes on after a problem: a person who
made a head wants to know everything that is wrong with it, where loading stops at the first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from peagle.drafter.config import DrafterConfig
from peagle.drafter.config_keys import Layout, config_layout, is_parallel
from peagle.drafter.config_problems import config_problems
from peagle.drafter.layouts import IGNORED, module_name, parse_config
from peagle.drafter.loading import check_d2t
from peagle.drafter.model import Drafter
from peagle.drafter.tensor_checks import INTEGERS, dtype_problems, twin_problems
from peagle.errors import InputError

# safetensors' names of dtypes -> torch's; of others, which no head has, the name is kept
TORCH_DTYPES = {
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "BF16": "bfloat16",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True, slots=True)
class TensorFacts:
    """One tensor: its shape, safetensors' name of its dtype, and its size in bytes."""

    shape: tuple[int, ...]
    dtype: str
    num_bytes: int


@dataclass(slots=True)
class HeadFacts:
    """A head as described. config is None when `config.json` cannot be understood; the own_* flags are the file's.

    tensors are under the names that the file uses. problems: everything that keeps the head from being loaded.
    """

    name: str
    layout: Layout | None = None
    target_name: str = ""
    config: DrafterConfig | None = None
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        """Numbers in the tensors that inference computes with: mappings and tensors it ignores left out."""
        names = ((name, module_name(name)) for name in self.tensors)
        return sum(prod(self.tensors[n].shape) for n, m in names if m != "d2t" and not IGNORED.search(m))


def read_head_facts(path: str | os.PathLike[str]) -> HeadFacts:
    """Describe a folder or a Hub id. Raises InputError only where there is no such head at all."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return _from_folder(str(path), folder)
    if folder.exists() or str(path).startswith((".", "/", "~")) or str(path).count("/") != 1:
        raise InputError(f"head: {str(path)!r} is not a folder, expected a head's folder or a Hub id like owner/name")
    return _from_hub(str(path))


def _from_folder(name: str, folder: Path) -> HeadFacts:
    facts = HeadFacts(name)
    config_file = folder / "config.json"
    raw: Any = None
    if not config_file.is_file():
        facts.problems.append(f"config.json: missing in {folder}")
    else:
        try:
            raw = json.loads(config_file.read_text())
        except OSError as error:
            facts.problems.append(f"config.json: cannot be read ({error.strerror or error})")
        except (ValueError, RecursionError) as error:  # numbers of thousands of digits and deep nesting too
            facts.problems.append(f"config.json: not valid JSON ({error})")
        else:
            facts.problems += not_an_object(raw)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        facts.problems.append(f"*.safetensors: none in {folder}")
    d2t = None
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118
                    view = opened.get_slice(key)
                    facts.tensors[key] = _tensor(tuple(view.get_shape()), view.get_dtype())
                    if module_name(key) == "d2t":  # a mapping, small
                        d2t = opened.get_tensor(key)
        except (SafetensorError, OSError) as error:
            facts.problems.append(f"{file.name}: cannot be read, it may be truncated or damaged ({error})")
    _understand(facts, raw, d2t)
    return facts


def _from_hub(name: str) -> HeadFacts:
    """From the Hub: its cached copy where there is one, otherwise config.json and the headers alone are fetched."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download

    patterns = ["*.json", "*.safetensors"]
    try:
        cached = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=True))
    except Exception:  # not cached
        cached = None
    if cached is not None and any(cached.glob("*.safetensors")):
        return _from_folder(name, cached)
    facts = HeadFacts(name)
    try:
        raw: Any = json.loads(Path(hf_hub_download(name, "config.json")).read_text())
        metadata = HfApi().get_safetensors_metadata(name)
    except Exception as error:
        raise InputError(
            f"head: {name!r} is no local folder and could not be had from the Hub ({error.__class__.__name__}: "
            f"{str(error).splitlines()[0]})"
        ) from error
    facts.problems += not_an_object(raw)
    for file in metadata.files_metadata.values():
        for key, tensor in file.tensors.items():
            facts.tensors[key] = _tensor(tuple(tensor.shape), tensor.dtype)
    _understand(facts, raw, None)
    return facts


def not_an_object(raw: Any) -> list[str]:
    """What is wrong with a parsed config.json as a whole."""
    return [] if isinstance(raw, dict) else [f"config.json: holds {type(raw).__name__}, expected a JSON object"]


def _tensor(shape: tuple[int, ...], dtype: str) -> TensorFacts:
    bits = {"BOOL": 8, "BF16": 16}.get(dtype) or int("".join(filter(str.isdecimal, dtype.split("_")[0])) or 8)
    return TensorFacts(shape, dtype, prod(shape) * bits // 8)


def _understand(facts: HeadFacts, raw: Any, d2t: torch.Tensor | None) -> None:
    """Fill in layout, config and problems from the parsed config.json, if it is an object, and the tensors."""
    if isinstance(raw, dict):
        facts.layout = config_layout(raw)
        facts.target_name = named_target(raw)
        wrong = config_problems(raw)
        facts.problems += wrong
        facts.config = None if wrong else parse_config(raw)
    names = {module_name(name) for name in facts.tensors}
    facts.problems += twin_problems(facts.tensors)
    if facts.config is None:  # no shapes to expect, but these are needed by any head
        parallel = isinstance(raw, dict) and is_parallel(raw)
        needed = ("fc.weight", "norm.weight", *(("mask_hidden",) if parallel else ()))
        facts.problems += [f"{name}: missing" for name in needed if names and name not in names]
    else:
        facts.config = replace(
            facts.config,
            own_embed_tokens="embed_tokens.weight" in names,
            own_lm_head="lm_head.weight" in names,
        )
        if facts.tensors:
            facts.problems += tensor_problems(facts.config, facts.tensors)
        if d2t is not None:
            facts.problems += d2t_problems(facts.config, d2t)


def d2t_problems(config: DrafterConfig, d2t: torch.Tensor) -> list[str]:
    """What is wrong with a mapping but its shape and dtype."""
    if str(d2t.dtype).removeprefix("torch.") not in INTEGERS:
        return []
    if not config.reduced_vocab:
        if not d2t.any():
            return []
        whole = f"draft_vocab_size is the whole vocabulary ({config.vocab_size}), expected none"
        return [f"d2t: maps to other ids, but {whole}"]
    if tuple(d2t.shape) == (config.draft_vocab_size,):
        try:
            check_d2t(d2t, config.vocab_size)
        except InputError as error:
            return [str(error)]
    return []


def named_target(raw: dict[str, Any]) -> str:
    """The target that the checkpoint names, if it does."""
    own, spec = raw.get("peagle"), raw.get("speculators_config")
    verifier = spec.get("verifier") if isinstance(spec, dict) else None
    for place, key in ((own, "target"), (verifier, "name_or_path")):
        if isinstance(place, dict) and isinstance(name := place.get(key), str) and name:
            return name
    return ""


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a head of this config under the module's names, without making any."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def tensor_problems(config: DrafterConfig, tensors: Mapping[str, TensorFacts]) -> list[str]:
    """All that is wrong with a checkpoint's tensors, given under the file's names, but for twins among them.

    The same rules as `load_drafter`, which stops at the first.
    """
    expected = expected_shapes(config)
    dtypes = {module_name(name): TORCH_DTYPES.get(t.dtype, t.dtype) for name, t in tensors.items()}
    problems = dtype_problems(dtypes, expected)
    found = {module_name(name): tensor.shape for name, tensor in tensors.items()}
    found = {name: shape for name, shape in found.items() if not IGNORED.search(name)}
    if config.kind == "eagle3" and "mask_hidden" in found:
        problems.append("mask_hidden: present, but the config names no mask token (ptd_token_id or mask_token_id)")
        del found["mask_hidden"]
    if not config.reduced_vocab:
        found.pop("d2t", None)  # allowed where it maps nothing
    for name, shape in expected.items():
        if name not in found:
            if not name.endswith("o_proj.bias"):  # attention_bias may be on q, k and v only
                problems.append(f"{name}: missing, expected shape {list(shape)}")
        elif found[name] != shape and not (name == "mask_hidden" and prod(found[name]) == prod(shape)):
            problems.append(f"{name}: shape {list(found[name])}, expected {list(shape)}")
    problems += [f"{name}: not a tensor of this kind of head" for name in sorted(set(found) - set(expected))]
    return problems
