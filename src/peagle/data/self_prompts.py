"""Prompts that the target writes itself: fed only its chat template's opening of a user turn, it writes the turn.

An instruct model has seen user turns in training and imitates them, so this gives prompts for any model with no data
set at all. Opening words ("Write a", "def") steer what they are about. What is no sensible prompt is filtered out.
"""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from peagle.data.chat_format import ChatFormat
from peagle.data.comparable import normalise
from peagle.data.contamination import ContaminationGuard, DropReport
from peagle.data.prompts import Prompt, make_prompt
from peagle.data.request_queue import NOT_ANSWERED, EngineLike, RequestQueue
from peagle.data.whole_text import whole_text
from peagle.engine.sampling_params import SamplingParams
from peagle.errors import InputError

SOURCE = "self"
_ASSISTANT_LIKE = re.compile(
    r"^(?:sure|certainly|of course|i'm sorry|i apologize|sorry,|as an ai|here(?:'s| is| are)|i'd be happy|"
    r"great question|you're welcome|i don't have|i'm glad|i'm happy)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class SelfPromptGroup:
    """`count` prompts that begin with one of `openings` (used in turn), under one source name.

    `temperature` None means that of the settings; a small model writes longer texts and code better below 1.
    """

    count: int
    name: str = SOURCE
    openings: tuple[str, ...] = ("",)
    temperature: float | None = None


def parse_group(spec: str, openings: Sequence[str] = ()) -> SelfPromptGroup:
    """Read `N[:name=NAME][:temperature=T][:openings=WORDS|WORDS|...]`, or `openings=FILE` with one opening a line.

    Args:
        openings: used when the spec has none.

    Raises:
        InputError: N is no positive number, an unknown option, or words that are no UTF-8.
    """
    count, *rest = re.split(r":(?=(?:name|openings|temperature)=)", spec)
    if not count.isdecimal() or int(count) < 1:
        raise InputError(
            f"--self-prompts {spec!r}: expected N[:name=NAME][:temperature=T][:openings=WORDS|WORDS or FILE], N above 0"
        )
    options = dict(part.split("=", 1) for part in rest)
    temperature = options.get("temperature")
    if temperature is not None and not re.fullmatch(r"\d+(\.\d+)?|\.\d+", temperature):
        raise InputError(f"--self-prompts {spec!r}: temperature={temperature}: expected a number of 0 or more")
    given = options.get("openings")
    if given is not None and Path(given).is_file():
        openings = [
            line.replace("\\n", "\n") for line in Path(given).read_text(encoding="utf-8").splitlines() if line.strip()
        ]
    elif given is not None:
        openings = given.replace("\\n", "\n").split("|")
    return SelfPromptGroup(
        count=int(count),
        name=whole_text(options.get("name", SOURCE), f"--self-prompts {spec!r}: name"),
        openings=tuple(whole_text(words, f"--self-prompts {spec!r}: openings") for words in openings) or ("",),
        temperature=None if temperature is None else float(temperature),
    )


@dataclass(frozen=True, slots=True)
class SelfPromptSettings:
    """How self-written turns are sampled and which are kept.

    Lengths count the turn's tokens. `max_repetition` bounds the share of a turn's runs of four words that repeat an
    earlier one; `min_compression` its compressed size over its size.
    """

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_tokens: int = 4
    min_words: int = 3
    max_tokens: int = 512
    max_repetition: float = 0.2
    min_compression: float = 0.3
    seed: int = 0


@dataclass
class SelfPromptReport:
    """How many turns were written, kept, and refused for which reason."""

    written: int = 0
    kept: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        reasons = ", ".join(f"{count} {reason}" for reason, count in self.refused.most_common())
        return f"self-written turns: {self.kept} kept of {self.written}" + (f" ({reasons})" if reasons else "")


@dataclass
class Attempts:
    """How many turns of a group were begun, over all runs; it is the next one's seed, so that none is made twice."""

    made: int = 0


class TurnFilter:
    """Decides whether what the target wrote in a user's place is a user turn worth answering.

    `met_again` counts the remembered turns that were written once more.
    """

    def __init__(self, chat: ChatFormat, settings: SelfPromptSettings, guard: ContaminationGuard | None = None):
        self._chat = chat
        self._settings = settings
        self._guard = guard
        self._seen: set[str] = set()
        self._remembered: set[str] = set()
        self.met_again = 0
        self.report = SelfPromptReport()
        self.contaminated = DropReport()

    def keep(self, token_ids: list[int], finish_reason: str, opening: str = "", once: bool = True) -> str | None:
        """The turn's text without its end marker, or None; every call is counted in `report`.

        Args:
            token_ids: what the target wrote, as the engine returned it.
            opening: words that stood before it and belong to the turn.
            once: refuse a turn with the words of an earlier one.
        """
        self.report.written += 1
        text, reason = self._judge(token_ids, finish_reason, opening.rstrip(" "), once)
        if reason is not None:
            self.report.refused[reason] += 1
            return None
        self.report.kept += 1
        return text

    def remember(self, turns: Iterable[str]) -> None:
        """Refuse these turns as duplicates from now on."""
        keys = {" ".join(normalise(turn)) for turn in turns}
        self._seen |= keys
        self._remembered |= keys

    def _judge(self, token_ids: list[int], finish_reason: str, opening: str, once: bool) -> tuple[str, str | None]:
        chat, settings = self._chat, self._settings
        text = opening + chat.tokenizer.decode(token_ids)
        end = chat.end_of_user_text
        if finish_reason in NOT_ANSWERED:
            return text, f"{finish_reason} by the server"
        if finish_reason != "stop":
            return text, "without an end"
        if chat.end_of_user_id is not None and (not token_ids or token_ids[-1] != chat.end_of_user_id):
            return text, "ended by another token"
        text = text.partition(end)[0].strip()
        words = normalise(text)
        if len(words) < settings.min_words or len(token_ids) < settings.min_tokens:
            return text, "too short"
        if any(marker in text for marker in self._special_texts()):
            return text, "with special tokens"
        if _ASSISTANT_LIKE.match(text):
            return text, "written as the assistant"
        if is_repetitive(text, words, settings):
            return text, "repetitive"
        if "\ufffd" in text:
            return text, "not text"
        key = " ".join(words)
        if once and key in self._seen:
            self.met_again += key in self._remembered
            self._remembered.discard(key)  # each once: a target that writes nothing else is given up in the end
            return text, "duplicate"
        match = self._guard.match(text) if self._guard is not None else None
        if match is not None:
            self.contaminated.add(SOURCE, text, match)
            return text, "too close to an evaluation prompt"
        self._seen.add(key)
        return text, None

    def _special_texts(self) -> list[str]:
        added = getattr(self._chat.tokenizer, "added_tokens_decoder", {}).values()
        return [str(token.content) for token in added if token.special and len(str(token.content)) > 1]


def is_repetitive(text: str, words: list[str], settings: SelfPromptSettings) -> bool:
    """Whether a turn runs in circles: repeated runs of four words, or text that compresses too well."""
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    if len(grams) >= 8 and 1 - len(set(grams)) / len(grams) > settings.max_repetition:
        return True
    raw = text.encode()
    return len(raw) >= 200 and len(zlib.compress(raw)) / len(raw) < settings.min_compression


def sampling_of(settings: SelfPromptSettings) -> SamplingParams:
    """Sampling of user turns as far as the settings say it. Raises InputError naming a bad one."""
    return SamplingParams(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
    )


def turn_params(chat: ChatFormat, settings: SelfPromptSettings, seed: int) -> SamplingParams:
    """Sampling for one user turn: it stops at the template's end-of-turn marker."""
    by_token = chat.end_of_user_id is not None
    return replace(
        sampling_of(settings),
        stop_token_ids=[chat.end_of_user_id] if chat.end_of_user_id is not None else None,
        stop=None if by_token else [chat.end_of_user_text],
        seed=seed,
    )


def write_prompts(
    engine: EngineLike,
    chat: ChatFormat,
    count: int,
    openings: Iterable[str] = ("",),
    settings: SelfPromptSettings = SelfPromptSettings(),
    turn_filter: TurnFilter | None = None,
    known: Iterable[str] = (),
    window: int = 2048,
    source: str = SOURCE,
    max_attempts_each: int = 8,
    attempts: Attempts | None = None,
) -> Iterator[Prompt]:
    """Yield `count` self-written first turns as they are finished.

    Args:
        openings: words to begin with, used in turn ("" for none).
        known: turns written earlier; they are not yielded again.
        window: requests kept in the engine.
        max_attempts_each: attempts per wanted prompt before giving up; a known turn's first return is not counted.
        attempts: those of earlier runs, counted on here.

    Raises:
        InputError: the target writes too few acceptable turns; says what was wrong with them.
    """
    turn_filter = turn_filter or TurnFilter(chat, settings)
    turn_filter.remember(known)
    attempts = attempts or Attempts()
    words = tuple(openings)
    queue: RequestQueue[str] = RequestQueue(engine, window)
    before, met_before, kept = attempts.made, turn_filter.met_again, 0
    bar = tqdm(total=count, desc="prompts", unit="prompt", dynamic_ncols=True)
    while kept < count:
        # No more than are likely to be needed: what runs past the wanted number is thrown away.
        share = max(turn_filter.report.kept / max(turn_filter.report.written, 1), 0.25)
        wanted = (count - kept) / share
        limit = before + turn_filter.met_again - met_before + count * max_attempts_each + 64
        while queue.has_room and len(queue) < wanted and attempts.made < limit:
            opening = words[attempts.made % len(words)]
            seed = stable_seed(settings.seed, source, attempts.made, opening)
            queue.submit(opening, chat.first_opening(opening), turn_params(chat, settings, seed))
            attempts.made += 1
        if not len(queue):
            break
        for done in queue.step():
            text = turn_filter.keep(done.token_ids, done.finish_reason, done.tag)
            if text is not None and kept < count:
                kept += 1
                bar.update()
                yield make_prompt(source, [text])
        bar.set_postfix_str(turn_filter.report.line().partition(": ")[2][:60], refresh=False)
    bar.close()
    queue.abort_all()
    if kept < count:
        raise InputError(
            f"--self-prompts {count}: only {kept} acceptable prompts in {attempts.made - before} attempts; "
            f"{turn_filter.report.line()}"
        )


def stable_seed(*parts: Any) -> int:
    """A seed of 31 bits that depends on the parts only."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:4]) >> 1
