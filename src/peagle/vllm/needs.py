"""What each engine needs to run a head, given what is known of head and target without their weights."""

from __future__ import annotations

from peagle.drafter.facts import HeadFacts
from peagle.drafter.layouts import module_name
from peagle.target.facts import TargetFacts
from peagle.target.head_fit import target_problems
from peagle.vllm.versions import MINIMUM, Trait, drafter_scatters


def head_traits(head: HeadFacts, target: TargetFacts | None) -> list[Trait]:
    """What of the known-problem table concerns this head on this target."""
    config = head.config
    traits: list[Trait] = []
    if config is None:
        return traits
    if config.kind == "p-eagle":
        traits.append("p-eagle")
        if head.layout == "speculators":
            traits.append("speculators-p-eagle")
    if not config.reduced_vocab and any(module_name(name) == "d2t" for name in head.tensors):
        traits.append("whole-d2t")
    if target is not None:
        counts = (target.full_layers, target.window_layers, config.num_hidden_layers)
        if drafter_scatters(*counts, threshold=1.25):
            traits.append("scattered")
        if drafter_scatters(*counts, threshold=1.5):
            traits.append("scattered-still")
    return traits


def serving_problems(head: HeadFacts, target: TargetFacts | None) -> list[str]:
    """Why stock vLLM, of any version, will not serve a head (None: whatever the target); empty where it will.

    Whether vLLM knows the target's architecture, and with EAGLE-3 heads, differs by version and is left to it.
    """
    fit = [] if target is None else target_problems(head, target)
    return [*head.problems, *fit, *vllm_problems(head)]


def vllm_problems(head: HeadFacts) -> list[str]:
    """What keeps stock vLLM, of any version, from loading a head that this package loads."""
    config = head.config
    if config is not None and config.reduced_vocab and not config.own_lm_head:
        return [
            "lm_head.weight: missing, but the draft vocabulary is reduced: vLLM can share a target's whole LM head, "
            "not some of its rows (peagle writes them into its heads)"
        ]
    return []


def vllm_minimum(head: HeadFacts) -> str:
    """The oldest vLLM for the head, as text."""
    if head.layout == "speculators" and head.config is not None and head.config.kind == "p-eagle":
        return "a version with pull request 41826 (May 2026), or the head in the native layout with 0.16 or later"
    return f"{MINIMUM[0]}.{MINIMUM[1]} or later"
