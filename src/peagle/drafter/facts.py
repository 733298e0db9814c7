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
from peagle.drafter.layouts import (
    IGNORED,
    MASK_TOKEN_KEYS,
    NATIVE_ARCHITECTURE,
    READABLE_ARCHITECTURES,
    Layout,
    module_name,
    parse_config,
)
from peagle.drafter.loading import check_d2t
from peagle.drafter.model import Drafter
from peagle.errors import InputError

LAYER_KEYS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


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
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            facts.problems.append(f"config.json: not valid JSON ({error})")
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
        raw = json.loads(Path(hf_hub_download(name, "config.json")).read_text())
        metadata = HfApi().get_safetensors_metadata(name)
    except Exception as error:
        raise InputError(
            f"head: {name!r} is no local folder and could not be had from the Hub ({error.__class__.__name__}: "
            f"{str(error).splitlines()[0]})"
        ) from error
    for file in metadata.files_metadata.values():
        for key, tensor in file.tensors.items():
            facts.tensors[key] = _tensor(tuple(tensor.shape), tensor.dtype)
    _understand(facts, raw, None)
    return facts


def _tensor(shape: tuple[int, ...], dtype: str) -> TensorFacts:
    bits = {"BOOL": 8, "BF16": 16}.get(dtype) or int("".join(filter(str.isdecimal, dtype.split("_")[0])) or 8)
    return TensorFacts(shape, dtype, prod(shape) * bits // 8)


def _understand(facts: HeadFacts, raw: Any, d2t: torch.Tensor | None) -> None:
    """Fill in layout, config and problems from the parsed config.json (None: there is none) and the tensors."""
    if raw is not None and not isinstance(raw, dict):
        facts.problems.append(f"config.json: holds {type(raw).__name__}, expected a JSON object")
    elif raw is not None:
        facts.layout = "speculators" if "speculators_model_type" in raw else "native"
        facts.target_name = named_target(raw)
        wrong = config_problems(raw)
        facts.problems += wrong
        if not wrong:
            facts.config = _parsed(raw, facts)
    names = {module_name(name) for name in facts.tensors}
    if facts.config is None:  # no shapes to expect, but these are needed by any head
        parallel = isinstance(raw, dict) and (
            raw.get("parallel_drafting") or raw.get("speculators_model_type") == "peagle"
        )
        needed = ("fc.weight", "norm.weight", *(("mask_hidden",) if parallel else ()))
        facts.problems += [f"{name}: missing" for name in needed if names and name not in names]
    else:
        facts.config = replace(
            facts.config,
            own_embed_tokens="embed_tokens.weight" in names,
            own_lm_head="lm_head.weight" in names,
        )
        if facts.tensors:
            shapes = {name: tensor.shape for name, tensor in facts.tensors.items()}
            facts.problems += tensor_problems(facts.config, shapes)
        if d2t is not None and facts.config.reduced_vocab and len(d2t) == facts.config.draft_vocab_size:
            try:
                check_d2t(d2t, facts.config.vocab_size)
            except InputError as error:
                facts.problems.append(str(error))


def named_target(raw: dict[str, Any]) -> str:
    """The target that the checkpoint names, if it does."""
    own, spec = raw.get("peagle"), raw.get("speculators_config")
    verifier = spec.get("verifier") if isinstance(spec, dict) else None
    for place, key in ((own, "target"), (verifier, "name_or_path")):
        if isinstance(place, dict) and place.get(key):
            return str(place[key])
    return ""


def _parsed(raw: dict[str, Any], facts: HeadFacts) -> DrafterConfig | None:
    try:
        return parse_config(raw)
    except KeyError as error:
        facts.problems.append(f"{error.args[0]}: missing")
    except InputError as error:
        facts.problems.append(str(error))
    except (TypeError, AttributeError, IndexError) as error:
        facts.problems.append(f"config.json: holds a value of the wrong type ({error})")
    return None


def config_problems(raw: dict[str, Any]) -> list[str]:
    """Keys of `config.json` that are missing or wrong, judged one by one; what depends on several is left to the
    reader of the config."""
    problems: list[str] = []
    kind = raw.get("speculators_model_type")
    layer: Any = raw
    if kind is not None:
        if kind not in ("peagle", "eagle3"):
            problems.append(f"speculators_model_type: got {kind!r}, expected 'peagle' or 'eagle3'")
        layer = raw.get("transformer_layer_config")
        if not isinstance(layer, dict):
            return [*problems, "transformer_layer_config: missing, expected the drafter layers' config"]
        parallel, mask = kind == "peagle", raw.get("mask_token_id")
        mask_key = "mask_token_id"
    else:
        architectures = raw.get("architectures") or []
        if not any(name in READABLE_ARCHITECTURES for name in architectures):
            problems.append(f"architectures: got {architectures}, expected {[NATIVE_ARCHITECTURE]}")
        mask = next((raw[key] for key in MASK_TOKEN_KEYS if raw.get(key) is not None), None)
        parallel, mask_key = bool(raw.get("parallel_drafting")) or mask is not None, "ptd_token_id"
    for key in LAYER_KEYS:
        value = layer.get(key)
        if value is None:
            problems.append(f"{key}: missing")
        elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
            problems.append(f"{key}: got {value!r}, expected a positive integer")
    for key, expected in (("model_type", "llama"), ("hidden_act", "silu")):
        if layer.get(key, expected) != expected:
            problems.append(f"{key}: got {layer[key]!r}, expected {expected!r}")
    if parallel and mask is None:
        problems.append(f"{mask_key}: missing, expected the id of the mask token (a P-EAGLE head cannot run without)")
    vocab = layer.get("vocab_size")
    if parallel and isinstance(mask, int) and isinstance(vocab, int) and not 0 <= mask < vocab:
        problems.append(f"{mask_key}: got {mask}, expected 0 to {vocab - 1}")
    return problems


def expected_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """The tensors of a head of this config under the module's names, without making any."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in Drafter(config).state_dict().items()}


def tensor_problems(config: DrafterConfig, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    """All that is wrong with a checkpoint's tensors, given their shapes under the file's names.

    The same rules as `load_drafter`, which stops at the first.
    """
    problems = []
    found = {module_name(name): shape for name, shape in shapes.items()}
    found = {name: shape for name, shape in found.items() if not IGNORED.search(name)}
    expected = expected_shapes(config)
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
