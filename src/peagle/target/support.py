"""Which models can run over paged caches. Any other would answer, but with words that are not its own."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel

from peagle.errors import InputError

# Chunked attention, convolutions and linear attention are none of what a block of keys and values holds.
LAYER_TYPES = frozenset(("full_attention", "sliding_attention"))
# settings that mean another cache than one key and one value of the same width a layer
OTHER_CACHES = {
    "kv_lora_rank": "multi-head latent attention",  # DeepSeek
    "num_kv_shared_layers": "layers that read another's keys and values",  # Gemma 3n
}


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The decoder's layers. Raises InputError for an architecture that has them elsewhere (GPT-2's time)."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InputError(f"model: {type(model).__name__} has no decoder with a list `layers`, expected one as Llama's")
    return layers


def check_paged(model: PreTrainedModel, config: Any) -> None:
    """Refuse a model that keeps more than keys and values, or whose attention cannot be replaced.

    config: the language model's own. Raises InputError.
    """
    name = type(model).__name__
    others = sorted(set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)
    if others or getattr(model, "_is_stateful", False):
        what = f"layers of type {others[0]}" if others else "a recurrent state"
        raise InputError(f"model: {name} has {what}, expected full or sliding-window attention in every layer")
    for key, what in OTHER_CACHES.items():
        if getattr(config, key, None):
            raise InputError(f"model: {name} has {what} ({key}), expected keys and values of its own in every layer")
    if not model._supports_attention_backend:
        raise InputError(f"model: {name} does not use Transformers' attention interface, expected a model that does")


def refuse_attention(module: nn.Module) -> NoReturn:
    """For an attention that was not handed the caches which the model was given."""
    raise InputError(f"model: {type(module).__name__} does not hand on what its model is given, expected one that does")
