"""Where a head's `config.json` keeps what, in the native layout and in speculators'."""

from __future__ import annotations

from typing import Any, Literal

Layout = Literal["native", "speculators"]
NATIVE_ARCHITECTURE = "LlamaForCausalLMEagle3"
# vLLM's other names for the same network
READABLE_ARCHITECTURES = (
    NATIVE_ARCHITECTURE,
    "Eagle3LlamaForCausalLM",
    "PeagleLlamaForCausalLM",
    "PEagleDraftModel",
)
MASK_TOKEN_KEYS = ("mask_token_id", "pard_token", "ptd_token_id")  # in vLLM's order of preference


def config_layout(raw: dict[str, Any]) -> Layout:
    """The layout of a `config.json`, right or wrong. A key that is null is none, as for every other key."""
    return "native" if raw.get("speculators_model_type") is None else "speculators"


def layer_of(raw: dict[str, Any]) -> Any:
    """What holds the Llama keys: the config itself, or an object within it (anything, where the config is wrong)."""
    return raw if config_layout(raw) == "native" else raw.get("transformer_layer_config")


def mask_token(raw: dict[str, Any]) -> tuple[str, Any]:
    """The key that names the mask token, and what it holds; None where there is none."""
    if config_layout(raw) == "speculators":
        return "mask_token_id", raw.get("mask_token_id")
    key = next((key for key in MASK_TOKEN_KEYS if raw.get(key) is not None), "ptd_token_id")
    return key, raw.get(key)


def is_parallel(raw: dict[str, Any]) -> bool:
    """Whether it is a P-EAGLE head's."""
    if config_layout(raw) == "speculators":
        return bool(raw["speculators_model_type"] == "peagle")
    return bool(raw.get("parallel_drafting")) or mask_token(raw)[1] is not None


def rope_of(layer: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings from either generation of Llama configs (`rope_parameters`, or `rope_theta` + `rope_scaling`).

    Where a config has both, `rope_scaling` wins, as in Transformers.
    """
    rope = dict(layer.get("rope_scaling") or layer.get("rope_parameters") or {})
    legacy_type = rope.pop("type", None) or "default"
    for key, default in (("rope_type", legacy_type), ("rope_theta", layer.get("rope_theta") or 10000.0)):
        if rope.get(key) is None:
            rope[key] = default
    return rope
