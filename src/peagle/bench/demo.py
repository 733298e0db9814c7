"""The demo's run: each prompt answered by plain decoding, with EAGLE-3 and with P-EAGLE, and what that took.

Only the engine's steps are timed, prefill included; drawing the answer is not. The modes take turns prompt by prompt,
so that whatever else the machine does falls on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from peagle.bench.compare import Difference, difference
from peagle.bench.conversations import EngineLike
from peagle.bench.demo_prompts import DemoPrompt
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import SpecMetrics
from peagle.target.model import Target

# The fastest K of the bundled heads on two CPU cores (`peagle demo --sweep`, docs/benchmarks.md); to be measured again
# when the heads change.
BEST_K_EAGLE3 = 3
BEST_K_P_EAGLE = 5
# On a CPU, where a row more costs: drafts that are likelier wrong than worth their row are not verified.
CONFIDENCE_THRESHOLD = 0.05
SWEPT_KS = range(1, 9)
WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of answering. k is 0 for plain decoding."""

    name: str
    k: int
    engine: EngineLike

    @property
    def label(self) -> str:
        return f"{self.name}, K = {self.k}" if self.k else self.name


@dataclass(slots=True)
class Answer:
    """One answer of one mode. accepted[i]: token i was a draft. seconds: the engine's steps."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)
    seconds: float = 0.0
    num_steps: int = 0
    spec: SpecMetrics = field(default_factory=SpecMetrics)

    @property
    def tokens_per_second(self) -> float:
        return len(self.token_ids) / self.seconds if self.seconds else 0.0


@dataclass(frozen=True, slots=True)
class Total:
    """A mode over all prompts. speed_up: its tokens/s over plain decoding's."""

    name: str
    k: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    acceptance_length: float
    speed_up: float


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """A head at one K, over all prompts."""

    name: str
    k: int
    tokens_per_second: float
    acceptance_length: float


class Screen(Protocol):
    """Where the demo shows itself while it runs."""

    def prompt(self, index: int, total: int, prompt: DemoPrompt) -> None: ...

    def begin(self, label: str, prompt_ids: Sequence[int]) -> None: ...

    def tokens(self, token_ids: Sequence[int], accepted: Sequence[bool]) -> None: ...

    def end(self, answer: Answer, plain: Answer | None) -> None: ...


def answer(
    engine: EngineLike,
    prompt_ids: Sequence[int],
    max_tokens: int,
    on_tokens: Callable[[Sequence[int], Sequence[bool]], None] | None = None,
) -> Answer:
    """Answer one prompt greedily; on_tokens gets every step's tokens and which of them were drafts."""
    result = Answer()
    engine.stats.reset()
    engine.add_request("demo", prompt_ids, SamplingParams(max_tokens=max_tokens, temperature=0.0))
    while engine.has_unfinished:
        started = time.perf_counter()
        outputs = engine.step()
        result.seconds += time.perf_counter() - started
        result.num_steps += 1
        for output in outputs:
            result.token_ids.extend(output.new_token_ids)
            result.accepted.extend(output.accepted_mask)
            if on_tokens is not None:
                on_tokens(output.new_token_ids, output.accepted_mask)
    result.spec.merge(engine.stats.spec)
    return result


def answer_line(answer: Answer, plain: Answer | None = None) -> str:
    """What an answer took."""
    parts = [
        f"{len(answer.token_ids)} tokens in {answer.seconds:.1f} s",
        f"{answer.tokens_per_second:.1f} tokens/s",
    ]
    if answer.spec.num_drafts:
        parts.append(f"acceptance length {answer.spec.acceptance_length:.2f}")
    if plain is not None and plain.tokens_per_second:
        parts.append(f"{answer.tokens_per_second / plain.tokens_per_second:.2f}x plain")
    return " · ".join(parts)


def warm_up(modes: Sequence[Mode], prompt_ids: Sequence[int]) -> None:
    """Let every mode answer a little, so that no timing includes the first touch of its memory."""
    for mode in modes:
        answer(mode.engine, prompt_ids, WARM_UP_TOKENS)


def run_prompts(
    modes: Sequence[Mode],
    prompts: Sequence[DemoPrompt],
    prompt_ids: Sequence[Sequence[int]],
    max_tokens: int,
    screen: Screen,
    after_prompt: Callable[[int], None] | None = None,
) -> list[list[Answer]]:
    """Every prompt in every mode, in order: answers[prompt][mode]. The first mode is plain decoding."""
    answers: list[list[Answer]] = []
    for index, (prompt, token_ids) in enumerate(zip(prompts, prompt_ids, strict=True)):
        screen.prompt(index, len(prompts), prompt)
        row: list[Answer] = []
        for mode in modes:
            screen.begin(mode.label, token_ids)
            row.append(answer(mode.engine, token_ids, max_tokens, screen.tokens))
            screen.end(row[-1], row[0] if len(row) > 1 else None)
        answers.append(row)
        if after_prompt is not None:
            after_prompt(index)
    return answers


def total(name: str, k: int, answers: Sequence[Answer], plain_rate: float | None = None) -> Total:
    """Sum a mode's answers. plain_rate: plain decoding's tokens/s; None where this is plain decoding."""
    spec = SpecMetrics()
    for one in answers:
        spec.merge(one.spec)
    num_tokens, seconds = sum(len(one.token_ids) for one in answers), sum(one.seconds for one in answers)
    rate = num_tokens / seconds if seconds else 0.0
    speed_up = 1.0 if plain_rate is None else rate / plain_rate if plain_rate else 0.0
    return Total(name, k, num_tokens, seconds, rate, spec.acceptance_length, speed_up)


def totals(modes: Sequence[Mode], answers: Sequence[Sequence[Answer]]) -> list[Total]:
    """A line of the final table for each mode; the first is plain decoding."""
    rows: list[Total] = []
    for index, mode in enumerate(modes):
        plain_rate = rows[0].tokens_per_second if rows else None
        rows.append(total(mode.name, mode.k, [row[index] for row in answers], plain_rate))
    return rows


def differences(
    target: Target | None, prompt_ids: Sequence[Sequence[int]], answers: Sequence[Sequence[Answer]], mode: int
) -> list[Difference]:
    """Where a mode's answers leave plain decoding's (mode 0); empty when they are identical."""
    found = [
        difference(target, index, 0, prompt_ids[index], row[0].token_ids, row[mode].token_ids)
        for index, row in enumerate(answers)
    ]
    return [one for one in found if one is not None]


def sweep(
    engines: Callable[[int], EngineLike],
    name: str,
    ks: Sequence[int],
    prompt_ids: Sequence[Sequence[int]],
    max_tokens: int,
    on_point: Callable[[SweepPoint], None] | None = None,
) -> list[SweepPoint]:
    """Measure a head at several K; engines(k) makes its engine."""
    points: list[SweepPoint] = []
    for k in ks:
        engine = engines(k)
        answer(engine, prompt_ids[0], WARM_UP_TOKENS)
        measured = total(name, k, [answer(engine, token_ids, max_tokens) for token_ids in prompt_ids])
        points.append(SweepPoint(name, k, measured.tokens_per_second, measured.acceptance_length))
        if on_point is not None:
            on_point(points[-1])
    return points


def best_k(points: Sequence[SweepPoint]) -> int:
    """The K with the most tokens/s."""
    return max(points, key=lambda point: point.tokens_per_second).k


def report(
    modes: Sequence[Mode],
    prompts: Sequence[DemoPrompt],
    answers: Sequence[Sequence[Answer]],
    texts: Sequence[str],
    rows: Sequence[Total],
    found: dict[str, list[Difference]],
    points: Sequence[SweepPoint],
) -> dict[str, Any]:
    """Everything as JSON. texts: plain decoding's answers; found: differences by mode name."""
    return {
        "modes": [asdict(row) for row in rows],
        "identical": not any(found.values()),
        "differences": {name: [asdict(one) for one in some] for name, some in found.items()},
        "sweep": [asdict(point) for point in points],
        "prompts": [
            {
                "kind": prompt.kind,
                "prompt": prompt.text,
                "text": text,
                "answers": [
                    {
                        "mode": mode.name,
                        "k": mode.k,
                        "num_tokens": len(one.token_ids),
                        "seconds": one.seconds,
                        "tokens_per_second": one.tokens_per_second,
                        "num_steps": one.num_steps,
                        "acceptance_length": one.spec.acceptance_length,
                        "accepted_per_position": one.spec.accepted_per_pos,
                        "token_ids": one.token_ids,
                        "accepted": one.accepted,
                    }
                    for mode, one in zip(modes, row, strict=True)
                ],
            }
            for prompt, text, row in zip(prompts, texts, answers, strict=True)
        ],
    }
