"""Whether a head was made for a target."""

from __future__ import annotations

from peagle.drafter.config import DrafterConfig, with_aux_layers
from peagle.errors import InputError


def fit_problems(config: DrafterConfig, *, vocab_size: int, hidden_size: int, num_layers: int) -> list[str]:
    """Why a head does not fit a target, each with the key and both values; empty when it fits."""
    problems = []
    if config.target_hidden_size != hidden_size:
        problems.append(f"head: target_hidden_size {config.target_hidden_size}, but the target's is {hidden_size}")
    if config.vocab_size != vocab_size:
        problems.append(f"head: vocab_size {config.vocab_size}, but the target's is {vocab_size}")
    if config.hidden_size != hidden_size and not (config.own_embed_tokens and config.own_lm_head):
        problems.append(
            f"head: hidden_size {config.hidden_size} differs from the target's {hidden_size}, so it cannot share the "
            "target's embeddings or LM head, and it brings none of its own"
        )
    try:
        ids = with_aux_layers(config, num_layers)[0].aux_hidden_state_layer_ids
    except InputError as error:
        return [*problems, f"head: {error}"]
    if max(ids) >= num_layers:
        problems.append(f"head: eagle_aux_hidden_state_layer_ids {list(ids)}, but the target has {num_layers} layers")
    return problems


def check_fits(config: DrafterConfig, *, vocab_size: int, hidden_size: int, num_layers: int) -> None:
    """Refuse a head that was made for another target, naming the key and both values."""
    for problem in fit_problems(config, vocab_size=vocab_size, hidden_size=hidden_size, num_layers=num_layers):
        raise InputError(problem)
