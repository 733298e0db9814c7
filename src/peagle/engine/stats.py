"""Acceptance statistics, per request and in total (the blog's acceptance length)."""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass, field


def _divide(a: float, b: float) -> float:
    return a / b if b else 0.0


CONTEXT_BIN = 512


@dataclass(slots=True)
class SpecMetrics:
    """What became of the drafts. One "draft" is one verification step with at least one draft token.

    accepted_per_pos[i] counts drafts whose first i+1 tokens were all accepted, drafts_per_pos[i] those that had so many
    (a request near its length limit drafts less), reached_per_pos[i] those that had so many and whose first i were all
    accepted. Without reached_per_pos (a server's counters) every draft counts as one that had all tokens. synthetic:
    drafts were accepted by chance, for a benchmark.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    drafts_per_pos: list[int] = field(default_factory=list)
    synthetic: bool = False
    reached_per_pos: list[int] = field(default_factory=list)

    def add(self, drafted: int, accepted: int) -> None:
        """Count one verification step."""
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self._deepen(drafted)
        for i in range(drafted):
            self.drafts_per_pos[i] += 1
        for i in range(accepted):
            self.accepted_per_pos[i] += 1
        for i in range(min(accepted + 1, drafted)):
            self.reached_per_pos[i] += 1

    def merge(self, other: SpecMetrics) -> None:
        """Add another request's counts."""
        self.synthetic |= other.synthetic
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        self._deepen(len(other.drafts_per_pos))
        counts = zip(other.drafts_per_pos, other.accepted_per_pos, other._reached(), strict=True)
        for i, (drafts, accepted, reached) in enumerate(counts):
            self.drafts_per_pos[i] += drafts
            self.accepted_per_pos[i] += accepted
            self.reached_per_pos[i] += reached

    def _deepen(self, depth: int) -> None:
        """Make room for so many positions."""
        self.reached_per_pos = self._reached()
        for counts in (self.drafts_per_pos, self.accepted_per_pos, self.reached_per_pos):
            counts.extend([0] * (depth - len(counts)))

    def _reached(self) -> list[int]:
        return self.reached_per_pos or [*self.drafts_per_pos[:1], *self.accepted_per_pos[:-1]]

    @property
    def acceptance_length(self) -> float:
        """AL = 1 + accepted / drafts, the bonus token included; 1.0 without drafts."""
        return 1.0 + _divide(self.num_accepted_tokens, self.num_drafts)

    @property
    def conditional_rates(self) -> list[float]:
        """Per position: how often it was accepted where it was drafted and those before it were accepted."""
        return [_divide(a, r) for a, r in zip(self.accepted_per_pos, self._reached(), strict=True)]

    @property
    def joint_rates(self) -> list[float]:
        """Per position: how often it and all positions before it are accepted, as the product of the conditional rates,
        so that it never rises. Where every step drafted all of them that is accepted_per_pos / num_drafts."""
        return list(itertools.accumulate(self.conditional_rates, operator.mul))


@dataclass(slots=True)
class ContextMetrics:
    """Acceptance by how long the context was. A verification step belongs to bin b when the tokens that stood before
    its drafts are b * CONTEXT_BIN or more, and fewer than (b + 1) * CONTEXT_BIN."""

    num_drafts: dict[int, int] = field(default_factory=dict)
    num_accepted_tokens: dict[int, int] = field(default_factory=dict)

    def add(self, context: int, accepted: int) -> None:
        """Count one verification step with drafts."""
        b = context // CONTEXT_BIN
        self.num_drafts[b] = self.num_drafts.get(b, 0) + 1
        self.num_accepted_tokens[b] = self.num_accepted_tokens.get(b, 0) + accepted

    def acceptance_lengths(self) -> dict[int, float]:
        """First context length of each bin that has steps -> acceptance length there."""
        return {
            b * CONTEXT_BIN: 1.0 + self.num_accepted_tokens[b] / steps for b, steps in sorted(self.num_drafts.items())
        }


@dataclass(slots=True)
class EngineStats:
    """Totals since the engine started (or since `reset`).

    prefix_cache_queries, prefix_cache_hits: tokens of requests that started, and how many of them were cached (vLLM's
    metrics of these names). synthetic: drafts are accepted by chance, for a benchmark.
    """

    spec: SpecMetrics = field(default_factory=SpecMetrics)
    by_context: ContextMetrics = field(default_factory=ContextMetrics)
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_finished: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    synthetic: bool = False

    def __post_init__(self) -> None:
        self.spec.synthetic = self.synthetic

    def reset(self) -> None:
        self.__init__(synthetic=self.synthetic)  # type: ignore[misc]
