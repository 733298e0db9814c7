"""The JSON of vLLM's --speculative-config."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from peagle.config.checks import check_positive, check_window, is_number
from peagle.draft_table import DraftTable, parse_draft_table
from peagle.errors import InputError

WeightDtype = Literal["auto", "target", "float16"]
VocabularyChoice = Literal["auto", "listed", "whole"]


@dataclass(frozen=True)
class SpeculativeConfig:
    """vLLM's speculative config. parallel_drafting: True for a P-EAGLE head, False for an EAGLE-3 head, None for
    whatever the head is; a head of the other kind is refused when it is loaded.

    rejection_sample_method "synthetic", for benchmarks only, accepts drafts whatever they are, so that what comes out
    is no text: either by synthetic_acceptance_rates, per position how often it and all before it are accepted, or by
    synthetic_acceptance_length, the mean number of tokens a step (1 to num_speculative_tokens + 1).

    num_speculative_tokens_per_batch_size: (first batch size, last, draft tokens) each, see `peagle.draft_table`.

    draft_weight_dtype (not in vLLM): how the drafter's weights, and the LM head as it reads it, are kept: "target" in
    the target's dtype, "float16" halved, which only a CPU with a float32 target can; "auto" halves them where that is
    so. The output stays the target's either way.

    draft_vocabulary (not in vLLM): the tokens that drafts are chosen from: "listed" those of the head's list and those
    of the texts (`peagle.drafter.draft_vocabulary`), which only a CPU with a float32 target can, "whole" all that the
    head knows; "auto" is the former where it can be. No output depends on it.

    confidence_threshold (not in vLLM; a CPU only): drafts whose joint probability, by the drafter, is below it are not
    verified, which saves their rows; 0 verifies all. No output depends on it.

    draft_window (not in vLLM): how many of the latest positions the drafter's rows see, so that it meets no distances
    that it was not trained on; None all, "auto" what the head says, or else as many as its longest training document
    had, where it says that. No output depends on it.
    """

    model: str
    num_speculative_tokens: int
    method: Literal["eagle3"] = "eagle3"
    parallel_drafting: bool | None = None
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    num_speculative_tokens_per_batch_size: DraftTable | None = None
    draft_weight_dtype: WeightDtype = "auto"
    draft_vocabulary: VocabularyChoice = "auto"
    confidence_threshold: float = 0.0
    draft_window: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if self.method != "eagle3":
            raise InputError(f"method: got {self.method!r}, expected 'eagle3' (also for P-EAGLE heads)")
        check_positive("num_speculative_tokens", self.num_speculative_tokens)
        if not isinstance(self.model, str) or not self.model:
            raise InputError(f"model: got {self.model!r}, expected a head's folder or Hub id")
        if self.parallel_drafting not in (None, True, False):
            raise InputError(f"parallel_drafting: got {self.parallel_drafting!r}, expected true or false")
        if (table := self.num_speculative_tokens_per_batch_size) is not None:
            table = parse_draft_table(table, self.num_speculative_tokens)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", table)
        if self.draft_weight_dtype not in get_args(WeightDtype):
            choices = ", ".join(get_args(WeightDtype))
            raise InputError(f"draft_weight_dtype: got {self.draft_weight_dtype!r}, expected one of {choices}")
        if self.draft_vocabulary not in get_args(VocabularyChoice):
            choices = ", ".join(get_args(VocabularyChoice))
            raise InputError(f"draft_vocabulary: got {self.draft_vocabulary!r}, expected one of {choices}")
        threshold = self.confidence_threshold
        if not is_number(threshold) or not 0 <= threshold < 1:
            raise InputError(f"confidence_threshold: got {threshold!r}, expected a number from 0 to less than 1")
        check_window(self.draft_window)
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rates is not None:
            if not isinstance(rates, Sequence) or not all(is_number(rate) for rate in rates):
                raise InputError(f"synthetic_acceptance_rates: got {rates!r}, expected a list of numbers")
            object.__setattr__(self, "synthetic_acceptance_rates", tuple(rates))
        if length is not None and not is_number(length):
            raise InputError(f"synthetic_acceptance_length: got {length!r}, expected a number")
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        method, rates, length = (
            self.rejection_sample_method,
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
        )
        k = self.num_speculative_tokens
        if method not in ("standard", "synthetic"):
            raise InputError(f"rejection_sample_method: got {method!r}, expected 'standard' or 'synthetic'")
        if method == "standard":
            if rates is not None or length is not None:
                raise InputError(
                    "synthetic_acceptance_rates, synthetic_acceptance_length: expected only with "
                    "rejection_sample_method 'synthetic'"
                )
        elif (rates is None) == (length is None):
            raise InputError(
                "rejection_sample_method: 'synthetic' needs synthetic_acceptance_rates or synthetic_acceptance_length, "
                "one of the two"
            )
        elif rates is not None:
            falling = all(a >= b for a, b in zip((1.0, *rates), (*rates, 0.0), strict=True))
            if len(rates) != k or not falling:
                raise InputError(
                    f"synthetic_acceptance_rates: got {list(rates)}, expected {k} numbers from 1 to 0, none above the "
                    "one before it"
                )
        elif length is not None and not 1 <= length <= k + 1:
            raise InputError(f"synthetic_acceptance_length: got {length}, expected 1 to {k + 1}")

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Per position how often it and all before it are to be accepted; None for real verification.

        A length becomes the rates of least variance, as in vLLM: whole positions first, then what is left.
        """
        if self.rejection_sample_method == "standard" or self.synthetic_acceptance_rates is not None:
            return self.synthetic_acceptance_rates
        assert self.synthetic_acceptance_length is not None
        accepted = self.synthetic_acceptance_length - 1
        return tuple(min(max(accepted - i, 0.0), 1.0) for i in range(self.num_speculative_tokens))

    @property
    def kind(self) -> Literal["p-eagle", "eagle3"] | None:
        """The kind of head that the flag asks for; None leaves it to the head."""
        if self.parallel_drafting is None:
            return None
        return "p-eagle" if self.parallel_drafting else "eagle3"

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """From JSON text, a mapping or a config; a key it does not know is refused by name."""
        if isinstance(value, SpeculativeConfig):
            return value
        settings = speculative_settings(value)
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                raise InputError(f"speculative_config: unknown key {key!r}, expected {', '.join(known)}")
        return cls(**settings)


def speculative_settings(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """The speculative config as a dict, keys that only vLLM knows included; refused without the two it must have."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InputError(f"speculative_config: {error}, expected a JSON object") from error
    if not isinstance(value, Mapping):
        raise InputError(f"speculative_config: got {value!r}, expected a JSON object")
    for key in ("model", "num_speculative_tokens"):
        if key not in value:
            raise InputError(f"speculative_config: {key} is missing")
    return dict(value)
