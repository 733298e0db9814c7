"""Transformers' own `generate`, as a user would call it: what plain decoding is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from peagle.bench.demo import WARM_UP_TOKENS, Answer
from peagle.target.loading import resolve_model
from peagle.target.model import Target


class TransformersBaseline:
    """A second copy of the target's weights, untouched by the engine (which may lay its own out differently)."""

    def __init__(self, target: Target) -> None:
        model = AutoModelForCausalLM.from_pretrained(resolve_model(target.name_or_path), dtype=target.dtype)
        self.model = model.to(target.device).eval()
        self.eos_token_ids = sorted(target.eos_token_ids)

    def answer(self, prompt_ids: Sequence[int], max_tokens: int) -> Answer:
        """Answer one prompt greedily; `generate` is timed as a whole, prefill included."""
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self.eos_token_ids or None,
            pad_token_id=self.eos_token_ids[0] if self.eos_token_ids else 0,
        )
        inputs = torch.tensor([list(prompt_ids)], device=self.model.device)
        started = time.perf_counter()
        with torch.inference_mode():
            output = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=config)
        token_ids = output[0, len(prompt_ids) :].tolist()  # waits for the device
        seconds = time.perf_counter() - started
        return Answer(token_ids, [False] * len(token_ids), seconds, len(token_ids))

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        self.answer(prompt_ids, WARM_UP_TOKENS)
