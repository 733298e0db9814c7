"""How many drafts a head gets accepted: the numbers of `peagle eval`.

Definitions, over all verification steps that had at least one draft token:

- acceptance length AL = 1 + accepted draft tokens / steps; the bonus token that the target adds each step is included;
- conditional rate at position i = steps in which the first i drafts were all accepted / steps that drafted at least i
  and in which the first i - 1 were accepted;
- joint rate at position i = product of the conditional rates up to i: how often the first i drafts are all accepted.

Near a request's length limit a step drafts less than K; such a step counts only for the positions that it drafted.
Where every step drafts K, the joint rate is the share of steps whose first i drafts were all accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from peagle.bench.compare import Difference, difference
from peagle.bench.conversations import Answers, Chat, EngineLike, answer_conversations
from peagle.data.prompts import Prompt
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import ContextMetrics, SpecMetrics
from peagle.target.model import Target


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Conversations under one name; a table row each."""

    name: str
    prompts: list[Prompt]

    @property
    def num_turns(self) -> int:
        return sum(len(prompt.turns) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Check:
    """Comparison with plain decoding: of num_answers, num_equal were the same, `first` is the first that was not."""

    num_answers: int
    num_equal: int
    first: Difference | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One row of the table: a head at one K over one prompt set at one temperature."""

    head: str
    kind: str
    prompt_set: str
    temperature: float
    k: int
    num_prompts: int
    num_turns: int
    num_skipped: int
    num_output_tokens: int
    seconds: float
    spec: SpecMetrics
    check: Check | None = None
    by_context: ContextMetrics = field(default_factory=ContextMetrics)

    def to_dict(self) -> dict[str, Any]:
        """As JSON: counts, and the rates that follow from them."""
        row = asdict(self)
        row["acceptance_length"] = self.spec.acceptance_length
        row["joint_rates"] = self.spec.joint_rates
        row["conditional_rates"] = self.spec.conditional_rates
        row["acceptance_lengths_by_context"] = self.by_context.acceptance_lengths()
        return row


def check_answers(target: Target | None, plain: Answers, other: Answers) -> Check:
    """Compare answers with plain decoding's. A conversation's turns behind a difference had another prompt and are not
    compared. `target` is needed for the logit gap."""
    compared = equal = 0
    first: Difference | None = None
    for index, (plain_turns, other_turns) in enumerate(zip(plain.turns, other.turns, strict=True)):
        for turn, (a, b) in enumerate(zip(plain_turns, other_turns, strict=False)):
            compared += 1
            found = difference(
                target if first is None else None, index, turn, a.prompt_token_ids, a.token_ids, b.token_ids
            )
            if found is not None:
                first = first or found
                break
            equal += 1
    return Check(compared, equal, first)


def evaluate_head(
    engine: EngineLike,
    target: Target,
    name: str,
    kind: str,
    prompt_sets: Iterable[PromptSet],
    ks: Sequence[int],
    temperatures: Sequence[float],
    params: SamplingParams,
    plain_answers: dict[tuple[str, float], Answers] | None = None,
    on_turn: Callable[[PromptSet, float, int, int], None] | None = None,
) -> list[Acceptance]:
    """One head at every K, over every prompt set, at every temperature.

    The engine serves the largest K; a smaller one is asked for per request, which changes nothing about the drafts
    before it (a depth sees no deeper one). Given `plain_answers`, answers are compared with plain decoding's; what
    it does not hold for a prompt set and temperature is decoded and entered, so that several heads share it. on_turn
    gets (prompt set, temperature, K or 0 for plain, answers so far).
    """
    rows: list[Acceptance] = []
    chat = Chat(target)
    for prompt_set in prompt_sets:
        for temperature in temperatures:

            def answer(k: int, prompt_set: PromptSet = prompt_set, temperature: float = temperature) -> Answers:
                return answer_conversations(
                    engine,
                    chat,
                    prompt_set.prompts,
                    replace(params, temperature=temperature, num_speculative_tokens=k),
                    None if on_turn is None else lambda done: on_turn(prompt_set, temperature, k, done),
                )

            plain = None
            if plain_answers is not None:
                plain = plain_answers.get((prompt_set.name, temperature)) or answer(0)
                plain_answers[prompt_set.name, temperature] = plain
            for k in ks:
                answers = answer(k)
                rows.append(
                    Acceptance(
                        head=name,
                        kind=kind,
                        prompt_set=prompt_set.name,
                        temperature=temperature,
                        k=k,
                        num_prompts=len(prompt_set.prompts),
                        num_turns=sum(map(len, answers.turns)),
                        num_skipped=answers.num_skipped,
                        num_output_tokens=answers.num_output_tokens,
                        seconds=answers.seconds,
                        spec=answers.spec,
                        by_context=answers.by_context,
                        check=None if plain is None else check_answers(target, plain, answers),
                    )
                )
    return rows
