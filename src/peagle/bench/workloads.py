"""What is asked in a benchmark: the well-known prompt sets, a file, or random tokens of given lengths."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from peagle.bench.demo_prompts import DEMO_PROMPTS
from peagle.data.prompts import Prompt, load_prompts, make_prompt, parse_source
from peagle.errors import InputError
from peagle.target.text import TargetText

# Where the sets are on the Hub. Their authors' files are read as well: NAME=FILE.
HUB = {
    "mt_bench": "hub:philschmid/mt-bench:train:turns",
    "humaneval": "hub:openai/openai_humaneval:test:prompt",
    "gsm8k": "hub:openai/gsm8k:test:question:config=main",
}
SPEED_BENCH = "hub:nvidia/SPEED-Bench:test"
SPEED_BENCH_CONFIGS = (
    "qualitative",
    *(f"throughput_{size}" for size in ("1k", "2k", "8k", "16k", "32k")),
)
# What stands in published rows in place of text that the data set may not pass on.
WITHHELD = "SHOULD BE FETCHED FROM THE SOURCE"
QUICK = "quick"
WARM_UP = "Warm-up. "
RANDOM_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, or (random) bare token ids, asked in this order. output_len: every answer has exactly so many
    tokens, whatever ends it otherwise; None lets answers end by themselves."""

    name: str
    source: str
    prompts: tuple[Prompt, ...] = ()
    token_ids: tuple[tuple[int, ...], ...] = ()
    output_len: int | None = None

    def __len__(self) -> int:
        return len(self.prompts) or len(self.token_ids)

    def num_requests(self, limit: int | None = None) -> int:
        """Answers to the first `limit` conversations, all turns counted."""
        return sum(len(prompt.turns) for prompt in self.prompts[:limit]) or len(self.token_ids[:limit])

    def shuffled(self) -> Workload:
        """In a fixed order that depends on the prompts alone, so that its beginning is a fair sample."""
        return replace(self, prompts=tuple(sorted(self.prompts, key=lambda prompt: prompt.prompt_id)))

    def unmeasured(self) -> Workload:
        """Other prompts of about the same lengths, without later turns; answers end by themselves. What a template puts
        before every prompt is all that they share with the workload's."""
        prompts = (
            make_prompt("warm-up", [_other_text(p.turns[0])], _other_text(p.system) if p.system else None)
            for p in self.prompts
        )
        ids = tuple((*one[1:], one[0]) for one in self.token_ids)
        return replace(self, prompts=tuple(prompts), token_ids=ids, output_len=None)

    @property
    def fingerprint(self) -> str:
        """Equal for the same content in the same order."""
        content = [[prompt.prompt_id for prompt in self.prompts], self.token_ids, self.output_len]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def _other_text(text: str) -> str:
    return WARM_UP + text[: max(len(text) - len(WARM_UP), 0)]


def load_workloads(specs: Sequence[str], num_prompts: int | None, text: TargetText | None, seed: int) -> list[Workload]:
    """One workload a spec; num_prompts keeps that many conversations of each, the same ones every time.

    Specs:
        mt_bench, humaneval, gsm8k          from the Hub; NAME=FILE from a file, with the options of `--prompts`
        speed_bench[:CONFIG[:CATEGORY]]     from the Hub (CONFIG qualitative, throughput_1k, ...), or speed_bench=FILE
        random:IN:OUT[:N]                   N prompts of IN random tokens, answers of exactly OUT
        quick                               eight short built-in prompts
        [NAME=]FILE[:option=value]...       any prompt file that `--prompts` takes
    Raises InputError.
    """
    workloads = [load_workload(spec, num_prompts, text, seed) for spec in specs]
    names = [workload.name for workload in workloads]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"--workload: two are named {name!r}, expected different names (NAME=FILE gives one)")
    return workloads


def load_workload(spec: str, num_prompts: int | None, text: TargetText | None, seed: int) -> Workload:
    """See `load_workloads`."""
    if spec == QUICK:
        prompts = [make_prompt(QUICK, [prompt]) for prompt in quick_prompts()]
        return Workload(QUICK, "built in", tuple(prompts[:num_prompts]))
    if spec == "random" or spec.startswith("random:"):
        return random_workload(spec, num_prompts, text, seed)
    match = re.fullmatch(r"([A-Za-z_][\w.-]*)=(.+)", spec)
    if match is not None:
        return from_source(match[2], match[1], num_prompts)
    if spec in HUB:
        try:
            return from_source(HUB[spec], spec, num_prompts)
        except InputError as error:
            raise InputError(
                f"--workload {spec}: {error}; where the Hub cannot be reached, name the file: --workload {spec}=FILE"
            )
    if spec == "speed_bench" or spec.startswith("speed_bench:"):
        return speed_bench(spec, num_prompts)
    return from_source(spec, None, num_prompts)


def from_source(spec: str, name: str | None, num_prompts: int | None) -> Workload:
    """A prompt file or Hub data set. `FILE:20` is short for `FILE:limit=20`."""
    source = parse_source(re.sub(r":(\d+)$", r":limit=\1", spec))
    source = replace(source, limit=source.limit or num_prompts)
    prompts = tuple(load_prompts([source]))
    withheld = sum(any(WITHHELD in turn for turn in prompt.turns) for prompt in prompts)
    if withheld:
        raise InputError(
            f"--workload {spec}: {withheld} of {len(prompts)} prompts hold no text, only a note that it has to be "
            "fetched elsewhere (SPEED-Bench may not pass on what others own); prepare the set with its authors' "
            "script and name the file: --workload speed_bench=FILE"
        )
    return Workload(name or source.name, source.location, prompts)


def speed_bench(spec: str, num_prompts: int | None) -> Workload:
    """SPEED-Bench from the Hub: split `test` of a configuration, all of it or one category."""
    config, _, category = spec.removeprefix("speed_bench").removeprefix(":").partition(":")
    config = config or "qualitative"
    if config not in SPEED_BENCH_CONFIGS:
        raise InputError(
            f"--workload {spec}: {config!r} is no configuration, expected {', '.join(SPEED_BENCH_CONFIGS)}"
        )
    where = f":where=category={category}" if category else ""
    name = "_".join(part for part in ("speed_bench", config, category) if part)
    try:
        return from_source(f"{SPEED_BENCH}:turns:config={config}{where}", name, num_prompts)
    except InputError as error:
        raise InputError(
            f"--workload {spec}: SPEED-Bench could not be had: {error}. Its licence (NVIDIA Evaluation Dataset "
            "License) does not let anybody pass it on, so it does not come with this package: it is read from the Hub, "
            "or from a file that its authors' script has made: --workload speed_bench=FILE"
        )


def random_workload(spec: str, num_prompts: int | None, text: TargetText | None, seed: int) -> Workload:
    """Tokens drawn evenly from the vocabulary, special ones left out. They say nothing about acceptance on text."""
    parts = spec.split(":")[1:]
    if len(parts) not in (2, 3) or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"--workload {spec}: expected random:IN:OUT or random:IN:OUT:N, all positive whole numbers")
    if text is None:
        raise InputError(f"--workload {spec}: needs TARGET, whose vocabulary the tokens are drawn from")
    length, output_len = int(parts[0]), int(parts[1])
    count = int(parts[2]) if len(parts) == 3 else num_prompts or RANDOM_PROMPTS
    special, size = set(text.eos_token_ids), text.facts.vocab_size
    if text.tokenizer is not None:
        special |= set(text.tokenizer.all_special_ids)
        size = min(size, len(text.tokenizer))
    allowed = np.array([token for token in range(size) if token not in special])
    drawn = np.random.default_rng(seed).choice(allowed, (count, length))
    ids = tuple(tuple(int(token) for token in row) for row in drawn)
    return Workload(f"random_{length}_{output_len}", spec, token_ids=ids, output_len=output_len)


def quick_prompts() -> list[str]:
    """The demo's prompts and two more: eight keep four users busy."""
    return [
        *(prompt.text for prompt in DEMO_PROMPTS),
        "Write an email to my landlord saying that the heating does not work, and ask when it will be repaired.",
        "List five differences between a frog and a toad.",
    ]
