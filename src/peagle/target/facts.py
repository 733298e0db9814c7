"""What a target's config says, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from peagle.errors import InputError
from peagle.target.loading import resolve_model, unreadable


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Sizes that a head is judged by. full_layers and window_layers count the attention layers of either kind."""

    name: str
    model_type: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    max_model_len: int
    full_layers: int
    window_layers: int

    @property
    def fits_arguments(self) -> dict[str, int]:
        """What `fit_problems` and `check_fits` ask for."""
        return {"vocab_size": self.vocab_size, "hidden_size": self.hidden_size, "num_layers": self.num_layers}


def target_facts(config: Any, name: str = "") -> TargetFacts:
    """From a Transformers config; of a multimodal one the text part counts. Raises InputError for a missing size."""
    text = config.get_text_config()
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if not isinstance(getattr(text, key, None), int):
            raise InputError(
                f"model: the config of {name!r} (model_type {config.model_type}) has no {key}, expected that of a "
                "decoder-only language model"
            )
    layers = int(text.num_hidden_layers)
    kinds = list(getattr(text, "layer_types", None) or ["full_attention"] * layers)
    window = sum(kind == "sliding_attention" for kind in kinds)
    return TargetFacts(
        name=name,
        model_type=str(config.model_type),
        hidden_size=int(text.hidden_size),
        vocab_size=int(text.vocab_size),
        num_layers=layers,
        max_model_len=int(getattr(text, "max_position_embeddings", 0) or 0),
        full_layers=sum(kind == "full_attention" for kind in kinds),
        window_layers=window,
    )


def read_target_config(source: str, name_or_path: str) -> Any:
    """The Transformers config at `source`, the resolved `name_or_path`. Raises InputError."""
    try:
        return AutoConfig.from_pretrained(source)
    except Exception as error:
        raise unreadable(name_or_path, source, error) from error


def read_target_facts(name_or_path: str) -> TargetFacts:
    """From a folder, a Hub id, a GGUF file or wheel:NAME (those two are converted once, as for loading)."""
    return target_facts(read_target_config(resolve_model(name_or_path), name_or_path), name_or_path)
