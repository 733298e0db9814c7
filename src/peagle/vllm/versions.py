"""What is known of vLLM's versions: the one place for it.

Versions are compared as (major, minor). Sources: vLLM's pull requests as named, and runs of 0.25.1 and 0.32 with heads
of this project.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Version = tuple[int, int]
# What a setting has that a problem can hang on.
Trait = Literal[
    "any", "p-eagle", "speculators-p-eagle", "scattered", "scattered-still", "whole-d2t", "dynamic-k", "cpu"
]

MINIMUM: Version = (0, 16)  # "Unified Parallel Drafting", pull request 32887
NEWEST: Version = (0, 33)  # the last one that was looked at: of later ones nothing is known for certain


@dataclass(frozen=True, slots=True)
class Problem:
    """Something a version does wrong.

    last: the last version known to have it; None: no later version is known without. first: the first version that has
    it; None: all before have it. fails_at_start: the server does not come up, so that there is no use in trying.
    """

    trait: Trait
    last: Version | None
    what: str
    instead: str
    first: Version | None = None
    fails_at_start: bool = False

    def affects(self, version: Version) -> bool:
        return (self.last is None or version <= self.last) and (self.first is None or version >= self.first)

    @property
    def versions(self) -> str:
        if self.first is not None:
            until = "later" if self.last is None else f"up to {self.last[0]}.{self.last[1]}"
            return f"{self.first[0]}.{self.first[1]} and {until}"
        return "every version so far" if self.last is None else f"up to {self.last[0]}.{self.last[1]}"


PROBLEMS = (
    Problem(
        "scattered",
        (0, 17),
        "a head of several layers on a target with sliding windows (gpt-oss-20b with its 4-layer head) fails at start, "
        "because the drafter's layers fall into several KV-cache groups",
        "take a version with the KV-group fix, pull request 36684 (merged in March 2026), or apply its one line",
        fails_at_start=True,
    ),
    Problem(
        "scattered-still",
        None,
        "the head has so many layers beside the target's sliding-window layers that they fall into several KV-cache "
        "groups even with the KV-group fix, and vLLM fails at start",
        "train a head with fewer layers",
        fails_at_start=True,
    ),
    Problem(
        "speculators-p-eagle",
        (0, 20),
        "P-EAGLE heads in the speculators layout are not known (pull request 41826, merged in May 2026)",
        "convert the head: peagle convert HEAD OUTPUT --layout native",
        fails_at_start=True,
    ),
    Problem(
        "whole-d2t",
        None,
        "a head with a d2t tensor although its draft vocabulary is the whole one is not loaded (no module or parameter "
        "named 'draft_id_to_target_id'; since pull request 53458, September 2026)",
        "convert the head, which leaves the tensor out: peagle convert HEAD OUTPUT --layout native",
        first=(0, 30),
        fails_at_start=True,
    ),
    Problem(
        "dynamic-k",
        (0, 33),
        "num_speculative_tokens_per_batch_size hands drafts to the wrong requests when K changes",
        "leave it out and choose one num_speculative_tokens",
    ),
    Problem(
        "any",
        (0, 33),
        "one request near the length limit stops drafting for the whole batch",
        "set --max-model-len well above prompt and answer together",
    ),
    Problem(
        "any",
        (0, 33),
        "requests with logit_bias or min_p are refused under speculation",
        "leave them out of requests",
    ),
    Problem(
        "p-eagle",
        (0, 33),
        "P-EAGLE lives in the V1 model runner only",
        "do not set VLLM_USE_V2_MODEL_RUNNER=1",
    ),
    Problem(
        "cpu",
        (0, 33),
        "on the CPU, verification ignores temperature, top-p and top-k, and a sampled request can corrupt a greedy one "
        "beside it; compiled output is wrong even without speculation",
        "ask greedily only, and add --enforce-eager",
    ),
)


def parse_version(text: str) -> Version | None:
    """`0.25.1`, `0.32.0+cpu`, `0.23.1rc1.dev4` -> (major, minor); None for a build that says no number.

    `0.1.dev13030+g1234567` says none: a build from a clone without tags, of whatever age.
    """
    if re.match(r"v?0\.1\.dev", text):
        return None
    match = re.match(r"v?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else None


def known_problems(version: Version | None, traits: Collection[Trait]) -> list[Problem]:
    """The problems that touch a setting with these traits; for an unknown version all of them."""
    return [
        problem
        for problem in PROBLEMS
        if (problem.trait == "any" or problem.trait in traits) and (version is None or problem.affects(version))
    ]


def certain_failures(version: Version | None, traits: Collection[Trait]) -> list[Problem]:
    """Those of the known problems with which this very version does not start; none for an unknown or later version."""
    if version is None or version > NEWEST:
        return []
    return [problem for problem in known_problems(version, traits) if problem.fails_at_start]


def drafter_scatters(full_layers: int, window_layers: int, drafter_layers: int, threshold: float) -> bool:
    """Whether vLLM splits the drafter's (full-attention) layers over KV-cache groups of a hybrid target.

    Its rule: all groups have the layer count of the rarer kind, or of the more frequent one where that has fewer than
    `threshold` times as many. So the full-attention layers, the drafter's among them, stay in one group unless they
    outnumber the sliding-window ones by that factor. A single drafter layer is never split. The threshold was 1.25
    before pull request 36684 and is 1.5 with it.
    """
    if not full_layers or not window_layers or drafter_layers < 2:
        return False
    return full_layers + drafter_layers >= window_layers * threshold
