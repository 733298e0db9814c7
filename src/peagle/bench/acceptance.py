"""How many drafts a head gets accepted: the numbers of `peagle eval`.

Definitions, over all verification steps that had at least one draft token:

- acceptance length AL = 1 + accepted draft tokens / steps; the bonus token that the target adds each step is included;
- joint rate at position i = steps in which the first i drafts were all accepted / steps that drafted at least i;
- conditional rate at position i = joint rate at i / joint rate at i - 1 (the joint rate at position 0 is 1).

Near a request's length limit a step drafts less than K; such a step counts only for the positions that it drafted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from peagle.bench.compare import Difference, difference
from peagle.data.chat_format import ChatFormat
from peagle.data.prompts import Prompt
from peagle.engine.outputs import StepOutput
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import EngineStats, SpecMetrics
from peagle.errors import InputError
from peagle.target.model import Target


class EngineLike(Protocol):
    """What is used of `peagle.engine.engine.Engine`."""

    stats: EngineStats
    max_model_len: int

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Any: ...

    def step(self) -> list[StepOutput]: ...

    @property
    def has_unfinished(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class PromptSet:
    """Conversations under one name; a table row each."""

    name: str
    prompts: list[Prompt]

    @property
    def num_turns(self) -> int:
        return sum(len(prompt.turns) for prompt in self.prompts)


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer: what the target was given, and the tokens it wrote."""

    prompt_token_ids: list[int]
    token_ids: list[int]


@dataclass(slots=True)
class Answers:
    """All conversations of a prompt set, answered. turns[i] belongs to prompt i and is shorter than the prompt's own
    where a later turn would not have fitted the model (`num_skipped` counts them). seconds: the engine's steps."""

    turns: list[list[Turn]]
    spec: SpecMetrics = field(default_factory=SpecMetrics)
    seconds: float = 0.0
    num_skipped: int = 0

    @property
    def num_output_tokens(self) -> int:
        return sum(len(turn.token_ids) for turns in self.turns for turn in turns)


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

    def to_dict(self) -> dict[str, Any]:
        """As JSON: counts, and the rates that follow from them."""
        row = asdict(self)
        row["acceptance_length"] = self.spec.acceptance_length
        row["joint_rates"] = self.spec.joint_rates
        row["conditional_rates"] = self.spec.conditional_rates
        return row


class HasTokenizer(Protocol):
    """What is used of a target to write its prompts."""

    name_or_path: str
    tokenizer: Any
    eos_token_ids: frozenset[int]


class Chat:
    """Turns of a conversation to token ids. A target without a chat template gets the first turn's bare text."""

    def __init__(self, target: HasTokenizer) -> None:
        if target.tokenizer is None:
            raise InputError(f"model: {target.name_or_path!r} has no tokenizer, and prompts are text")
        self.tokenizer = target.tokenizer
        has_template = bool(getattr(target.tokenizer, "chat_template", None))
        self.format = ChatFormat(target.tokenizer, sorted(target.eos_token_ids)) if has_template else None

    def num_turns(self, prompt: Prompt) -> int:
        """How many of a prompt's turns the target's template can put."""
        return len(prompt.turns) if self.format is not None and self.format.next_user is not None else 1

    def first(self, prompt: Prompt) -> list[int]:
        """Token ids of the conversation up to where the first answer begins."""
        if self.format is None:
            return list(self.tokenizer.encode(prompt.turns[0]))
        return self.format.first_turn(prompt.turns[0], prompt.system)

    def later(self, prompt: Prompt, turn: int, before: Turn) -> list[int]:
        """Token ids up to where answer `turn` begins: the turn before, the model's own answer to it, and the turn."""
        assert self.format is not None
        appended = self.format.later_turn(prompt.turns[turn], before.token_ids)
        return [*before.prompt_token_ids, *before.token_ids, *appended]


def answer_conversations(
    engine: EngineLike,
    chat: Chat,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    on_turn: Callable[[int], None] | None = None,
) -> Answers:
    """Answer every turn of every conversation, all at once: continuous batching is the engine's business.

    A later turn is asked when its conversation's answer before it is complete. Each request has a seed of its own,
    derived from params.seed, so that sampled answers depend neither on K nor on the batch. on_turn is called with the
    number of answers (skipped ones included) after every step that ended some. Raises InputError for a first turn that
    is longer than the model.
    """
    engine.stats.reset()
    answers = Answers([[] for _ in prompts])
    asked: dict[str, tuple[int, list[int]]] = {}
    written: dict[str, list[int]] = {}

    def ask(conversation: int, turn: int, token_ids: list[int]) -> None:
        request_id = f"{conversation}.{turn}"
        seed = None if params.seed is None else params.seed + 1_000 * conversation + turn
        asked[request_id] = (conversation, token_ids)
        written[request_id] = []
        engine.add_request(request_id, token_ids, replace(params, seed=seed))

    first_turns = [chat.first(prompt) for prompt in prompts]
    for index, (prompt, token_ids) in enumerate(zip(prompts, first_turns, strict=True)):
        if len(token_ids) >= engine.max_model_len:
            raise InputError(
                f"--prompts: prompt {index + 1} of {prompt.source} has {len(token_ids)} tokens, expected fewer than "
                f"{engine.max_model_len} (max_model_len)"
            )
    for index, token_ids in enumerate(first_turns):
        ask(index, 0, token_ids)

    done = 0
    while engine.has_unfinished:
        started = time.perf_counter()
        outputs = engine.step()
        answers.seconds += time.perf_counter() - started
        before = done
        for output in outputs:
            written[output.request_id].extend(output.new_token_ids)
            if not output.finished:
                continue
            index, token_ids = asked.pop(output.request_id)
            turns, prompt = answers.turns[index], prompts[index]
            turns.append(Turn(token_ids, written.pop(output.request_id)))
            done += 1
            if len(turns) == len(prompt.turns):
                continue
            following = chat.later(prompt, len(turns), turns[-1]) if len(turns) < chat.num_turns(prompt) else None
            if following is not None and len(following) < engine.max_model_len:
                ask(index, len(turns), following)
            else:
                answers.num_skipped += len(prompt.turns) - len(turns)
                done += len(prompt.turns) - len(turns)
        if on_turn is not None and done > before:
            on_turn(done)
    answers.spec.merge(engine.stats.spec)
    return answers


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
                        check=None if plain is None else check_answers(target, plain, answers),
                    )
                )
    return rows
