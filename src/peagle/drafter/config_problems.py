"""All that is wrong with a head's `config.json`: what `peagle inspect` lists, and loading refuses the first of."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from peagle.drafter.config import DrafterConfig
from peagle.drafter.config_keys import (
    NATIVE_ARCHITECTURE,
    READABLE_ARCHITECTURES,
    config_layout,
    is_parallel,
    layer_of,
    mask_token,
    rope_of,
)
from peagle.drafter.model import make_rotary
from peagle.errors import InputError

SHORT = reprlib.Repr()  # a wrong value may be of any size and depth
SHORT.maxlist = SHORT.maxdict = 12
SHORT.maxstring = SHORT.maxother = 80


@dataclass(frozen=True, slots=True)
class Rule:
    """What a key may hold. Null is as good as no key."""

    holds: Callable[[Any], bool]
    expected: str
    required: bool = False


def whole(most: int, required: bool = False) -> Rule:
    """The bounds are far above any head's: what lies beyond is a slip, and would take memory or time without end."""
    return Rule(lambda value: _is_int(value) and 1 <= value <= most, f"a positive integer up to {most}", required)


def _is_int(value: Any) -> bool:
    return type(value) is int  # true and false are of another type, though Python counts with them


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value <= 1e15  # NaN and infinity are not


def _are_layer_ids(value: Any) -> bool:
    numbers = isinstance(value, list) and all(_is_int(i) and 0 <= i < 2**31 for i in value)
    # ascending, because vLLM hands the states over in layer order whatever the order written here
    return numbers and all(a < b for a, b in pairwise(value))


POSITIVE = Rule(_is_positive, "a positive number")
POSITIVES = Rule(lambda v: isinstance(v, list) and all(map(_is_positive, v)), "a list of positive numbers")
YES_NO = Rule(lambda value: isinstance(value, bool), "true or false")
TEXT = Rule(lambda value: isinstance(value, str), "a string")
OBJECT = Rule(lambda value: isinstance(value, dict), "an object")
LAYER_IDS = Rule(
    _are_layer_ids,
    "the ids (0 or more, ascending, each once) of the target layers whose input the head reads",
)
LENGTH = whole(2**31 - 1)
NORMS = {"fc_norm": YES_NO, "norm_output": YES_NO, "num_aux_hidden_states": whole(1024)}

# beside the layer's keys, or among them where they are not apart
TOP: dict[str, Rule] = {
    "draft_vocab_size": whole(2**24),
    "target_hidden_size": whole(2**20),
    "eagle_aux_hidden_state_layer_ids": LAYER_IDS,
    "norm_before_residual": YES_NO,
    "norm_before_fc": YES_NO,
    **NORMS,
}
LAYER: dict[str, Rule] = {
    "hidden_size": whole(2**20, required=True),
    "intermediate_size": whole(2**22, required=True),
    "num_hidden_layers": whole(1024, required=True),
    "num_attention_heads": whole(2**14, required=True),
    "vocab_size": whole(2**24, required=True),
    "num_key_value_heads": whole(2**14),
    "head_dim": whole(2**14),
    "max_position_embeddings": LENGTH,
    "rms_norm_eps": POSITIVE,
    "attention_bias": YES_NO,
    "rope_theta": POSITIVE,
    "rope_scaling": OBJECT,
    "rope_parameters": OBJECT,
    **NORMS,
}
PARTS: dict[str, dict[str, Rule]] = {
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS, "norm_before_fc": YES_NO},
    "peagle": {"k_train": whole(2**16), "max_train_length": LENGTH, "draft_window": LENGTH},
}
ROPE: dict[str, Rule] = {
    "rope_type": TEXT,
    "type": TEXT,
    **dict.fromkeys(("rope_theta", "factor", "attention_factor", "beta_fast", "beta_slow"), POSITIVE),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "partial_rotary_factor"), POSITIVE),
    **dict.fromkeys(("mscale", "mscale_all_dim"), Rule(lambda v: _is_positive(v) or v == 0, "a number from 0 up")),
    "original_max_position_embeddings": LENGTH,
    "short_factor": POSITIVES,
    "long_factor": POSITIVES,
    "truncate": YES_NO,
}


def config_problems(raw: dict[str, Any]) -> list[str]:
    """All that keeps a config.json of either layout from being a head's, each with the key, its value and what was
    expected; empty where `parse_config` takes it."""
    speculators, layer = config_layout(raw) == "speculators", layer_of(raw)
    problems = _speculators_problems(raw) if speculators else _native_problems(raw)
    problems += _judge(raw, TOP)
    for name, rules in PARTS.items():
        problems += _judge(raw, {name: OBJECT})
        if isinstance(raw.get(name), dict):
            problems += _judge(raw[name], rules)
    if isinstance(layer, dict):
        problems += _judge(layer, LAYER)
        for key, expected in (("model_type", "llama"), ("hidden_act", "silu")):
            if layer.get(key, expected) != expected:
                problems.append(_wrong(key, layer[key], repr(expected)))
        problems += _rope_problems(layer)
    problems += _joint_problems(raw, layer if isinstance(layer, dict) else {})
    return list(dict.fromkeys(problems))  # a key that may stand in two places is told once


def _wrong(key: str, value: Any, expected: str) -> str:
    return f"{key}: got {SHORT.repr(value)}, expected {expected}"


def _judge(holder: dict[str, Any], rules: Mapping[str, Rule], prefix: str = "") -> list[str]:
    """The keys of an object one by one."""
    problems = []
    for key, rule in rules.items():
        value = holder.get(key)
        if value is None and rule.required:
            problems.append(f"{prefix}{key}: missing, expected {rule.expected}")
        elif value is not None and not rule.holds(value):
            problems.append(_wrong(prefix + key, value, rule.expected))
    return problems


def _native_problems(raw: dict[str, Any]) -> list[str]:
    names = raw.get("architectures")
    problems = _judge(raw, {"parallel_drafting": YES_NO})
    if not isinstance(names, list) or not any(name in READABLE_ARCHITECTURES for name in names):
        problems.insert(0, _wrong("architectures", [] if names is None else names, str([NATIVE_ARCHITECTURE])))
    return problems


def _speculators_problems(raw: dict[str, Any]) -> list[str]:
    problems, kind, layer = [], raw["speculators_model_type"], raw.get("transformer_layer_config")
    if kind not in ("peagle", "eagle3"):
        problems.append(_wrong("speculators_model_type", kind, "'peagle' or 'eagle3'"))
    if layer is None:
        problems.append("transformer_layer_config: missing, expected the drafter layers' config")
    elif not isinstance(layer, dict):
        problems.append(_wrong("transformer_layer_config", layer, "the drafter layers' config"))
    problems += _judge(raw, {"speculators_config": OBJECT})
    spec = raw.get("speculators_config")
    methods = spec.get("proposal_methods") if isinstance(spec, dict) else None
    if methods is not None and not (isinstance(methods, list) and all(isinstance(m, dict) for m in methods)):
        problems.append(_wrong("proposal_methods", methods, "a list of objects"))
    elif methods:
        problems += _judge(methods[0], {"speculative_tokens": whole(2**16)})
    return problems


def _rope_problems(layer: dict[str, Any]) -> list[str]:
    """Wrong settings; where each is right by itself, what Transformers makes of them together."""
    names = ("rope_scaling", "rope_parameters")
    if _judge(layer, dict.fromkeys(names, OBJECT)):
        return []  # told
    problems = [problem for name in names for problem in _judge(layer.get(name) or {}, ROPE, f"{name}.")]
    if problems or _judge(layer, {"rope_theta": POSITIVE}):
        return problems
    rope, head_dim = rope_of(layer), _head_dim(layer) or 64
    head_dim += head_dim % 2  # an odd one is told elsewhere
    config = DrafterConfig(  # of its sizes the head's own ones count here
        kind="eagle3",
        hidden_size=head_dim,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=head_dim,
        vocab_size=1,
        aux_hidden_state_layer_ids=(),
        max_position_embeddings=_good(layer, LAYER, "max_position_embeddings") or 2048,
        rope_parameters=rope,
    )
    try:
        rotary = make_rotary(config)
        sane = bool(rotary.inv_freq.isfinite().all()) and _is_positive(float(rotary.attention_scaling))
        rotated = 2 * rotary.inv_freq.numel()
    except InputError as error:
        return [str(error)]
    except Exception as error:  # Transformers' own, of no common class
        text = " ".join(str(error).split())  # some have several lines
        return [_wrong("rope_parameters", rope, f"settings that Transformers computes with ({text})")]
    if not sane:
        return [_wrong("rope_parameters", rope, "settings that give finite frequencies")]
    if rotated != head_dim:
        return [_wrong("rope_parameters", rope, f"all {head_dim} dimensions of an attention head to be rotated")]
    return []


def _joint_problems(raw: dict[str, Any], layer: dict[str, Any]) -> list[str]:
    """What depends on several keys, as far as each of them is right."""
    problems = []
    heads, kv_heads, vocab, hidden = (
        _good(layer, LAYER, key) for key in ("num_attention_heads", "num_key_value_heads", "vocab_size", "hidden_size")
    )
    if heads and kv_heads and heads % kv_heads:
        problems.append(f"num_attention_heads: got {heads}, expected a multiple of num_key_value_heads ({kv_heads})")
    if heads and hidden and hidden % heads:  # whatever head_dim is: Transformers, and with it vLLM, take no other
        problems.append(f"hidden_size: got {hidden}, expected a multiple of num_attention_heads ({heads})")
    head_dim = _head_dim(layer)
    if head_dim is not None and head_dim % 2:
        problems.append(f"head_dim: got {head_dim}, expected an even number (RoPE rotates pairs)")
    draft = _good(raw, TOP, "draft_vocab_size")
    if draft and vocab and draft > vocab:
        problems.append(f"draft_vocab_size: got {draft}, expected 1 to {vocab}")
    key, mask = mask_token(raw)
    parallel = is_parallel(raw)
    if parallel and mask is None:
        problems.append(f"{key}: missing, expected the id of the mask token (a P-EAGLE head cannot run without)")
    elif mask is not None and not _is_int(mask):
        problems.append(_wrong(key, mask, "the id of the mask token"))
    elif parallel and vocab and not 0 <= mask < vocab:
        problems.append(f"{key}: got {mask}, expected 0 to {vocab - 1}")
    # the places in the order in which `parse_config` reads them
    eagle = raw.get("eagle_config")
    norm_before_fc = (eagle if isinstance(eagle, dict) else {}).get("norm_before_fc", raw.get("norm_before_fc"))
    if norm_before_fc is True and raw.get("fc_norm", layer.get("fc_norm")) is True:
        problems.append("norm_before_fc, fc_norm: both are set, expected at most one of them")
    return problems


def _good(holder: dict[str, Any], rules: Mapping[str, Rule], key: str) -> Any:
    """The value of a key where it is right, otherwise None."""
    value = holder.get(key)
    return value if value is not None and rules[key].holds(value) else None


def _head_dim(layer: dict[str, Any]) -> int | None:
    """What is said of it or follows; None where something in the way is wrong, or nothing would be left for a head."""
    if layer.get("head_dim") is not None:
        said: int | None = _good(layer, LAYER, "head_dim")
        return said
    hidden, heads = _good(layer, LAYER, "hidden_size"), _good(layer, LAYER, "num_attention_heads")
    return (hidden // heads or None) if hidden and heads else None
