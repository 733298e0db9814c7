"""Conversations answered by an engine: prompts as its target's template puts them, turn after turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from peagle.data.chat_format import ChatFormat
from peagle.data.prompts import Prompt
from peagle.engine.outputs import StepOutput
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import ContextMetrics, EngineStats, SpecMetrics
from peagle.errors import InputError


class EngineLike(Protocol):
    """What is used of `peagle.engine.engine.Engine`."""

    stats: EngineStats
    max_model_len: int

    def add_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Any: ...

    def step(self) -> list[StepOutput]: ...

    @property
    def has_unfinished(self) -> bool: ...


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
    by_context: ContextMetrics = field(default_factory=ContextMetrics)
    seconds: float = 0.0
    num_skipped: int = 0

    @property
    def num_output_tokens(self) -> int:
        return sum(len(turn.token_ids) for turns in self.turns for turn in turns)


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
        self.name, self.tokenizer = target.name_or_path, target.tokenizer
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
    answers.by_context = engine.stats.by_context  # the next call's reset makes a new one
    return answers
