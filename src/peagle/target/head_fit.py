"""A head and a target against each other before any weights are read."""

from __future__ import annotations

from peagle.drafter.config import with_aux_layers
from peagle.drafter.facts import HeadFacts, read_head_facts
from peagle.drafter.fit import fit_problems
from peagle.errors import InputError
from peagle.target.facts import TargetFacts, read_target_config, target_facts
from peagle.target.loading import resolve_model
from peagle.target.refusal import engine_refusal


def target_problems(head: HeadFacts, target: TargetFacts) -> list[str]:
    """Why the head does not fit; empty too when its config could not be read, which is a problem of its own."""
    return [] if head.config is None else fit_problems(head.config, **target.fits_arguments)


def target_warnings(head: HeadFacts, target: TargetFacts) -> list[str]:
    """What is allowed but worth knowing."""
    config = head.config
    if config is None:
        return []
    warnings = []
    if not config.aux_hidden_state_layer_ids and not target_problems(head, target):
        warnings.append(with_aux_layers(config, target.num_layers)[1])
    if target.max_model_len and config.max_position_embeddings < target.max_model_len:
        warnings.append(
            f"max_position_embeddings is {config.max_position_embeddings}, the target's {target.max_model_len}: drafts "
            "may be accepted less often beyond it"
        )
    return warnings


def check_head(head: str, target: TargetFacts, kind: str | None = None, flag: str = "head") -> HeadFacts:
    """The facts of a head that our engine runs on the target; kind: what it has to be, where that is known.

    Raises InputError with everything that is wrong; `flag` is what the user named the head with.
    """
    facts = read_head_facts(head)
    problems = [*facts.problems, *target_problems(facts, target)]
    if kind is not None and facts.config is not None and facts.config.kind != kind:
        why = ", by the speculative config's parallel_drafting" if flag == "head" else ""
        problems.append(f"kind: is {facts.config.kind}, expected {kind}{why}")
    if problems:
        lines = "".join(f"\n  {problem}" for problem in problems)
        raise InputError(f"{flag} {head} does not fit {target.name}:{lines}")
    return facts


def check_by_config(target: str, head: str | None = None, kind: str | None = None) -> None:
    """Refuse a target that the engine does not run, and a head that does not fit it or is of another kind, before
    minutes of loading. Raises InputError."""
    config = read_target_config(resolve_model(target), target)
    if (refusal := engine_refusal(config, target)) is not None:
        raise InputError(refusal)
    if head is not None:
        check_head(head, target_facts(config, target), kind)
