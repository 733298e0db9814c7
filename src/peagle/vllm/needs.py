"""What each engine needs to run a head, given what is known of head and target without their weights."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from peagle.drafter.draft_vocabulary import FILE, read_draft_vocabulary
from peagle.drafter.facts import HeadFacts
from peagle.drafter.layouts import module_name
from peagle.engine.memory import host_memory
from peagle.errors import InputError
from peagle.target.facts import TargetFacts
from peagle.target.head_fit import target_problems
from peagle.target.loading import auto_dtype
from peagle.vllm.versions import MINIMUM, Trait, drafter_scatters

# Tensors that vLLM does not look up by their whole name: as its 0.32 loads them, and versions before it.
PASSED_OVER = re.compile(r"mask_hidden|t2d|rotary_emb\.inv_freq")


def head_traits(head: HeadFacts, target: TargetFacts | None) -> list[Trait]:
    """What of the known-problem table concerns this head on this target."""
    config = head.config
    traits: list[Trait] = []
    if config is None:
        return traits
    if config.kind == "p-eagle":
        traits.append("p-eagle")
        if head.layout == "speculators":
            traits.append("speculators-p-eagle")
    if not config.reduced_vocab and any(module_name(name) == "d2t" for name in head.tensors):
        traits.append("whole-d2t")
    if target is not None:
        counts = (target.full_layers, target.window_layers, config.num_hidden_layers)
        if drafter_scatters(*counts, threshold=1.25):
            traits.append("scattered")
        if drafter_scatters(*counts, threshold=1.5):
            traits.append("scattered-still")
    return traits


def serving_problems(head: HeadFacts, target: TargetFacts | None) -> list[str]:
    """Why stock vLLM, of any version, will not serve a head (None: whatever the target); empty where it will.

    Whether vLLM knows the target's architecture, and with EAGLE-3 heads, differs by version and is left to it.
    """
    fit = [] if target is None else target_problems(head, target)
    return [*head.problems, *fit, *vllm_problems(head)]


def vllm_problems(head: HeadFacts) -> list[str]:
    """What keeps stock vLLM, of any version, from loading a head that this package loads."""
    config, problems = head.config, name_problems(head.tensors)
    if config is not None and config.reduced_vocab and not config.own_lm_head:
        problems.append(
            "lm_head.weight: missing, but the draft vocabulary is reduced: vLLM can share a target's whole LM head, "
            "not some of its rows (peagle writes them into its heads)"
        )
    return problems


def name_problems(names: Iterable[str]) -> list[str]:
    """Tensors of a head, by their names in its files, that vLLM looks for a place for in vain."""
    read = sorted(name for name in names if not PASSED_OVER.search(name))
    foreign = [name for name in read if module_name(name).startswith("verifier_")]
    prefixed = [name for name in read if name.startswith("model.") and name not in foreign]
    problems = []
    if prefixed:  # vLLM puts it before the names itself
        problems.append(
            f"{first_of(prefixed)}: vLLM fails at start, expected tensor names without 'model.' before them; convert "
            "the head: peagle convert HEAD OUTPUT --layout native"
        )
    if foreign:
        problems.append(f"{first_of(foreign)}: vLLM fails at start, expected a head without these tensors")
    return problems


def first_of(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def vllm_minimum(head: HeadFacts) -> str:
    """The oldest vLLM for the head, as text."""
    if head.layout == "speculators" and head.config is not None and head.config.kind == "p-eagle":
        return "a version with pull request 41826 (May 2026), or the head in the native layout with 0.16 or later"
    return f"{MINIMUM[0]}.{MINIMUM[1]} or later"


def peagle_needs(head: HeadFacts, config: Any = None, name: str = "") -> dict[str, Any]:
    """What our engine needs to run a head that it takes, as JSON. config: the Transformers config of the target `name`,
    which it takes too; None: no target is known, and 16 bits a weight are taken for a GPU.

    Bytes are those of the weights as they are loaded: a GPU's in the target's dtype, a CPU's in float32.
    """
    gpu_width = 2 if config is None else auto_dtype(config, name, "cuda").itemsize
    numbers = {"head": head.num_parameters, "target": None if config is None else num_parameters(config)}
    weights: dict[str, Any] = {
        part: None if number is None else {"gpu_bytes": number * gpu_width, "cpu_bytes": number * 4}
        for part, number in numbers.items()
    }
    quantization = getattr(config, "quantization_config", None)
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    device, available = memory_here()
    needed = None if config is None else sum(part[f"{device}_bytes"] for part in weights.values())
    return {
        "num_speculative_tokens": {"least": 1, "trained": None if head.config is None else head.config.k_train},
        "weights": weights,
        "target_quantized": None if method is None else str(method),
        "here": {
            "device": device,
            "available_bytes": available,
            "fits": None if needed is None or available is None else needed <= available,
        },
        "draft_vocabulary": draft_vocabulary(head),
    }


def num_parameters(config: Any) -> int:
    """Weights of a model of this Transformers config; shared ones count once, quantised ones as what they stand for."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


def memory_here() -> tuple[str, int | None]:
    """The device that our engine takes here, "gpu" or "cpu", and its free bytes (None: the system does not say)."""
    if torch.cuda.is_available():
        return "gpu", int(torch.cuda.mem_get_info()[0])
    return "cpu", host_memory()


def draft_vocabulary(head: HeadFacts) -> dict[str, Any] | None:
    """The list beside a head that a CPU drafts from: how many tokens it names, the share of its answers' tokens that
    they make (coverage, None if it does not say), and what is wrong with it (problem, or None). None: there is none, or
    it is not read because the head's draft vocabulary is reduced."""
    if head.config is None or head.config.reduced_vocab:
        return None
    folder = vocabulary_folder(head.name)
    try:
        listed = None if folder is None else read_draft_vocabulary(folder, head.config.vocab_size)
    except InputError as error:
        return {"listed": None, "coverage": None, "problem": str(error)}
    if folder is None or listed is None:
        return None
    coverage = json.loads((folder / FILE).read_text()).get("coverage")
    if type(coverage) not in (int, float):  # nothing hangs on it
        coverage = None
    return {"listed": len(listed), "coverage": coverage, "problem": None}


def vocabulary_folder(head: str) -> Path | None:
    """Where a head's list lies: its folder, or the Hub's cache, into which the list alone is fetched."""
    folder = Path(head).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(head, FILE)).parent
    except Exception:  # it has none, or the Hub cannot be reached: `read_head_facts` has said so
        return None
