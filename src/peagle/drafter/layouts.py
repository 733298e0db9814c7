"""What heads' config.json and tensors are called (docs/method.md, "The checkpoint"): the native layout, which stock
vLLM loads, and speculators'."""

from __future__ import annotations

import re
from typing import Any

from peagle.drafter.config import DrafterConfig
from peagle.drafter.config_keys import (
    NATIVE_ARCHITECTURE,
    Layout,
    config_layout,
    is_parallel,
    layer_of,
    mask_token,
    rope_of,
)
from peagle.drafter.config_problems import config_problems
from peagle.errors import InputError


def module_name(name: str) -> str:
    """A checkpoint's tensor name -> this module's."""
    name = name.removeprefix("model.")
    return name.replace("midlayer.", "layers.0.", 1)


# Tensors that heads of other makers carry and that inference does not read (a hidden_norm works in layer 0 only).
IGNORED = re.compile(r"t2d$|^verifier_(lm_head|norm)\.|rotary_emb\.inv_freq$|^layers\.[1-9]\d*\.hidden_norm\.")


def parse_config(raw: dict[str, Any]) -> DrafterConfig:
    """A head's config from the content of config.json in either layout. Raises InputError for the first problem."""
    for problem in config_problems(raw):
        raise InputError(problem)
    own = raw.get("peagle") or {}  # what this package notes beside the keys that others read
    eagle = raw.get("eagle_config") or {}  # where some native heads keep their settings
    layer, parallel = layer_of(raw), is_parallel(raw)
    k_train, residual = own.get("k_train"), False
    if config_layout(raw) == "speculators":
        residual = not parallel  # speculators' own default when the key is absent (as vLLM reads it)
        if "k_train" not in own:
            methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
            k_train = methods[0].get("speculative_tokens")
    # heads of other makers often name none: `with_aux_layers` settles it once the target is known
    aux = raw.get("eagle_aux_hidden_state_layer_ids") or eagle.get("eagle_aux_hidden_state_layer_ids") or ()
    hidden, heads = layer["hidden_size"], layer["num_attention_heads"]
    return DrafterConfig(
        kind="p-eagle" if parallel else "eagle3",
        hidden_size=hidden,
        intermediate_size=layer["intermediate_size"],
        num_hidden_layers=layer["num_hidden_layers"],
        num_attention_heads=heads,
        num_key_value_heads=layer.get("num_key_value_heads") or heads,
        head_dim=layer.get("head_dim") or hidden // heads,
        vocab_size=layer["vocab_size"],
        draft_vocab_size=raw.get("draft_vocab_size") or layer["vocab_size"],
        target_hidden_size=raw.get("target_hidden_size") or hidden,
        aux_hidden_state_layer_ids=tuple(aux),
        num_aux_hidden_states=raw.get("num_aux_hidden_states") or layer.get("num_aux_hidden_states") or 0,
        rms_norm_eps=layer.get("rms_norm_eps") or 1e-6,
        rope_parameters=rope_of(layer),
        max_position_embeddings=layer.get("max_position_embeddings") or 2048,
        attention_bias=bool(layer.get("attention_bias", False)),
        norm_before_residual=bool(raw.get("norm_before_residual", residual)),
        norm_before_fc=bool(eagle.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", layer.get("fc_norm", False))),
        norm_output=bool(raw.get("norm_output", layer.get("norm_output", False))),
        mask_token_id=mask_token(raw)[1],
        k_train=k_train,
        max_train_length=own.get("max_train_length"),
        draft_window=own.get("draft_window"),
    )


def layer_config(config: DrafterConfig) -> dict[str, Any]:
    """The Llama keys of a head, in both generations of RoPE keys so that older readers find theirs."""
    rope = dict(config.rope_parameters)
    keys: dict[str, Any] = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta", 10000.0),
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": config.num_aux_hidden_states,  # vLLM assumes 3 without it
    }
    if rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = {k: v for k, v in rope.items() if k != "rope_theta"}
    return keys


def config_json(config: DrafterConfig, layout: Layout, target_name: str = "") -> dict[str, Any]:
    """`config.json` of a head in one of the two layouts."""
    common: dict[str, Any] = {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }
    if config.aux_hidden_state_layer_ids:
        common["eagle_aux_hidden_state_layer_ids"] = list(config.aux_hidden_state_layer_ids)
    own: dict[str, Any] = {"k_train": config.k_train, "target": target_name}
    for name in ("max_train_length", "draft_window"):
        if getattr(config, name) is not None:
            own[name] = getattr(config, name)
    if layout == "native":
        raw = {"architectures": [NATIVE_ARCHITECTURE], **layer_config(config), **common, "peagle": own}
        if config.kind == "p-eagle":
            raw |= {"parallel_drafting": True, "ptd_token_id": config.mask_token_id}
        return raw
    name = "peagle" if config.kind == "p-eagle" else "eagle3"
    # an unknown depth is not invented: beside a target vLLM takes that of its --speculative-config
    method: dict[str, Any] = {"proposal_type": "greedy"}
    if config.k_train is not None:
        method["speculative_tokens"] = config.k_train
    # vLLM reads these two of a peagle head from the layer config only
    norms = {"fc_norm": config.fc_norm, "norm_output": config.norm_output}
    raw = {
        "architectures": ["PEagleSpeculator" if name == "peagle" else "Eagle3Speculator"],
        "speculators_model_type": name,
        "speculators_version": "0.9.0",
        "transformer_layer_config": layer_config(config) | norms,
        "speculators_config": {
            "algorithm": name,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        **common,
        "peagle": own,
    }
    if config.kind == "p-eagle":
        raw["mask_token_id"] = config.mask_token_id
    return raw
