"""`peagle demo` from its settings to its report: load, sweep if asked, warm up, answer, compare."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from peagle.bench import demo
from peagle.bench.compare import Difference, describe
from peagle.bench.conversations import Chat
from peagle.bench.demo_prompts import DEMO_PROMPTS, DemoPrompt
from peagle.bench.demo_screen import PlainScreen, make_screen
from peagle.bench.machine import machine_facts, machine_line
from peagle.bench.transformers_baseline import TransformersBaseline
from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.data.prompts import make_prompt
from peagle.engine.engine import Engine
from peagle.engine.loading import load_engine
from peagle.errors import InputError
from peagle.target.loading import load_target
from peagle.target.model import Target

EAGLE3, P_EAGLE = "EAGLE-3", "P-EAGLE"


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """What the command line gives. A head that is None is left out; prompts empty: the built-in ones."""

    target: str
    eagle3: str | None
    p_eagle: str | None
    k_eagle3: int | None = None
    k_p_eagle: int | None = None
    confidence_threshold: float | None = None
    sweep: bool = False
    prompts: Sequence[str] = ()
    max_tokens: int = 256
    dtype: str = "auto"
    device: str | None = None
    transformers: bool = False


def run_demo(settings: DemoSettings) -> dict[str, Any]:
    """Run the whole demo on the terminal; returns what `--json` writes. Raises InputError."""
    target = load_target(settings.target, settings.dtype, settings.device)
    prompts = [DemoPrompt("your prompt", text) for text in settings.prompts] or list(DEMO_PROMPTS)
    chat = Chat(target)
    prompt_ids = [chat.first(make_prompt("demo", [prompt.text])) for prompt in prompts]
    max_model_len = _length_needed(target, prompt_ids, settings.max_tokens)
    screen = make_screen(target.tokenizer)
    facts = machine_facts(target.device, target.dtype)
    screen.line(f"{settings.target} on {machine_line(facts)}")

    best = {EAGLE3: settings.k_eagle3 or demo.BEST_K_EAGLE3, P_EAGLE: settings.k_p_eagle or demo.BEST_K_P_EAGLE}
    threshold = settings.confidence_threshold
    if threshold is None:
        threshold = demo.CONFIDENCE_THRESHOLD if target.device.type == "cpu" else 0.0
    engines = {
        name: _engines(target, head, name == P_EAGLE, threshold, max_model_len)
        for name, head in ((EAGLE3, settings.eagle3), (P_EAGLE, settings.p_eagle))
        if head is not None
    }
    points: list[demo.SweepPoint] = []
    if settings.sweep:
        points = _sweep(engines, prompt_ids, settings.max_tokens, screen)
        best |= {name: demo.best_k([point for point in points if point.name == name]) for name in engines}
    plain = load_engine(target, config=_engine_config(max_model_len))
    modes = [demo.Mode("plain", 0, plain)]
    modes += [demo.Mode(name, best[name], engine(best[name])) for name, engine in engines.items()]

    screen.note("warming up")
    demo.warm_up(modes, prompt_ids[0])
    baseline = TransformersBaseline(target) if settings.transformers else None
    if baseline is not None:
        baseline.warm_up(prompt_ids[0])
    baseline_answers: list[demo.Answer] = []

    def run_baseline(index: int) -> None:
        if baseline is not None:
            baseline_answers.append(baseline.answer(prompt_ids[index], settings.max_tokens))
            screen.note(f"\nTransformers' generate: {demo.answer_line(baseline_answers[-1])}")

    screen.legend()
    answers = demo.run_prompts(modes, prompts, prompt_ids, settings.max_tokens, screen, run_baseline)
    rows = demo.totals(modes, answers)
    if baseline is not None:
        rows.append(demo.total("Transformers", 0, baseline_answers, rows[0].tokens_per_second))
    found = {mode.name: demo.differences(target, prompt_ids, answers, i) for i, mode in enumerate(modes) if i}
    screen.totals(rows)
    _tell_differences(screen, found, len(prompts), rows[0].num_tokens)
    assert target.tokenizer is not None  # `Chat` has refused a target without
    texts = [
        target.tokenizer.decode(row[0].token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for row in answers
    ]
    heads = {"target": settings.target, "eagle3": settings.eagle3, "p_eagle": settings.p_eagle}
    return {
        "settings": {**heads, "max_tokens": settings.max_tokens, "confidence_threshold": threshold},
        "machine": facts,
        **demo.report(modes, prompts, answers, texts, rows, found, points),
    }


def _length_needed(target: Target, prompt_ids: Sequence[Sequence[int]], max_tokens: int) -> int:
    """What the engines have to hold: the longest prompt and its answer, within the model's own length."""
    longest = max(map(len, prompt_ids))
    if longest >= target.max_model_len:
        raise InputError(f"--prompt: got {longest} tokens, expected fewer than the model's {target.max_model_len}")
    return min(longest + max_tokens, target.max_model_len)


def _engine_config(max_model_len: int) -> EngineConfig:
    """One request at a time; without prefix caching, because prompts are answered more than once and timed."""
    return EngineConfig(max_num_seqs=1, max_model_len=max_model_len, enable_prefix_caching=False)


def _engines(
    target: Target, head: str, parallel: bool, threshold: float, max_model_len: int
) -> Callable[[int], Engine]:
    """Engines for one request at a time around the one loaded target, by K."""
    config = _engine_config(max_model_len)
    return lambda k: load_engine(
        target,
        SpeculativeConfig(head, k, parallel_drafting=parallel, confidence_threshold=threshold),
        config=config,
    )


def _sweep(
    engines: dict[str, Callable[[int], Engine]],
    prompt_ids: Sequence[Sequence[int]],
    max_tokens: int,
    screen: PlainScreen,
) -> list[demo.SweepPoint]:
    """Measure every head at every K, saying so as it goes."""
    screen.note(f"measuring K = {demo.SWEPT_KS[0]} to {demo.SWEPT_KS[-1]} for each head")

    def tell(point: demo.SweepPoint) -> None:
        screen.note(f"  {point.name}, K = {point.k}: {point.tokens_per_second:.1f} tokens/s")

    points: list[demo.SweepPoint] = []
    for name, engine in engines.items():
        points += demo.sweep(engine, name, demo.SWEPT_KS, prompt_ids, max_tokens, tell)
    screen.sweep(points)
    return points


def _tell_differences(
    screen: PlainScreen, found: dict[str, list[Difference]], num_prompts: int, num_tokens: int
) -> None:
    """The line that says whether the outputs are identical, or a line for each head whose are not."""
    if not any(found.values()):
        names = " and ".join(found)
        screen.verdict(f"Outputs identical: {names} gave the same {num_tokens} tokens as plain decoding.", True)
    for name, some in found.items():
        if some:
            equal = f"{num_prompts - len(some)} of {num_prompts} answers of {name} are plain decoding's"
            screen.verdict(f"Outputs differ: {equal}; first difference: {describe(some[0])}.", False)
