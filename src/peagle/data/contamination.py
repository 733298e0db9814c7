"""Guard against evaluation prompts in training data.

A training turn is refused when it is too close to a turn of an evaluation file, by the first of these rules that holds
(all on lower-case words without punctuation, so white space, case and quoting do not matter):

- `exact`: the same words;
- `contains`: one holds the other in full (a template around an evaluation prompt, or a part of it);
- `13-gram`: they share 13 words in a row, the usual test for contamination of pre-training data;
- `5-gram`: at least half of all their runs of five words are shared, or six tenths of the evaluation prompt's;
- `words`: nearly all distinct words, numbers included, are shared: the same task reordered or lightly paraphrased;
- `function`: code for a function of the same name whose description shares words with the evaluation prompt's, or text
  naming a function of three or more words (`has_close_elements`) that an evaluation prompt defines;
- `task`: code, or a request for code, whose description says what an evaluation prompt's docstring says.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from peagle.data.comparable import Comparable, comparable, grams, plain_name
from peagle.data.prompts import Prompt, load_prompts

LONG_GRAM = 13
MIN_CONTAINED_WORDS = 6  # a shorter evaluation turn ("Can you parallelize it?") counts only when it is the whole turn
MIN_PART_WORDS = 10  # a training turn that is a mere part of an evaluation turn needs this many words
JACCARD = 0.5
COVERED = 0.6
WORDS_SHARED = 0.8
MIN_WORDS = 8
DOCSTRING_SHARED = 0.2


@dataclass(frozen=True, slots=True)
class Match:
    """Why a training turn is refused: the rule, and the evaluation prompt it is close to."""

    rule: str
    eval_source: str
    eval_text: str


@dataclass
class DropReport:
    """Counts of refused prompts by (training source, evaluation source, rule), with a few examples of each."""

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    examples: dict[tuple[str, str, str], list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, source: str, text: str, match: Match) -> None:
        key = (source, match.eval_source, match.rule)
        self.counts[key] += 1
        if len(self.examples[key]) < 3:
            self.examples[key].append((text, match.eval_text))

    def lines(self) -> list[str]:
        """One line a key: "gsm8k_train: 3 prompts too close to gsm8k_test (13-gram)"."""
        return [f"{s}: {n} prompt(s) too close to {e} ({rule})" for (s, e, rule), n in sorted(self.counts.items())]


class ContaminationGuard:
    """Index of evaluation prompts; `match` answers whether a training turn is too close to one of them."""

    def __init__(self, prompts: Iterable[Prompt]):
        self._entries: list[Comparable] = []
        self._exact: dict[str, int] = {}
        self._long: dict[str, int] = {}
        self._short: dict[str, set[int]] = defaultdict(set)
        self._by_word: dict[str, set[int]] = defaultdict(set)
        self._by_function: dict[str, set[int]] = defaultdict(set)
        self._by_description: dict[str, set[int]] = defaultdict(set)
        for prompt in prompts:
            for turn in prompt.turns:
                self._index(comparable(prompt.source, turn))

    @classmethod
    def from_files(cls, sources: Sequence[str]) -> "ContaminationGuard":
        """Read evaluation files by the same syntax as `--prompts`; every user turn of every row counts.

        Raises:
            InputError: a file cannot be read.
        """
        return cls(load_prompts(sources))

    def __len__(self) -> int:
        return len(self._entries)

    def _index(self, entry: Comparable) -> None:
        number = len(self._entries)
        self._entries.append(entry)
        self._exact.setdefault(entry.joined, number)
        for gram in grams(entry.words, LONG_GRAM):
            self._long.setdefault(gram, number)
        for gram in entry.short_grams:
            self._short[gram].add(number)
        for word in entry.distinct:
            self._by_word[word].add(number)
        for name in entry.functions:
            self._by_function[name].add(number)
        for word in entry.description if entry.functions else ():
            self._by_description[word].add(number)

    def match(self, text: str) -> Match | None:
        """The first rule that `text`, one user turn, breaks; None if it is clear of all evaluation prompts."""
        mine = comparable("", text)
        if not mine.words:
            return None
        found = (
            self._match_exact(mine)
            or self._match_long(mine)
            or self._match_short(mine)
            or self._match_words(mine)
            or self._match_function(mine)
            or self._match_task(mine)
        )
        if found is None:
            return None
        rule, number = found
        return Match(rule, self._entries[number].source, self._entries[number].text)

    def match_prompt(self, prompt: Prompt) -> Match | None:
        """`match` over all turns of a prompt."""
        return next((found for turn in prompt.turns if (found := self.match(turn)) is not None), None)

    def _match_exact(self, mine: Comparable) -> tuple[str, int] | None:
        number = self._exact.get(mine.joined)
        return None if number is None else ("exact", number)

    def _match_long(self, mine: Comparable) -> tuple[str, int] | None:
        for gram in grams(mine.words, LONG_GRAM):
            if gram in self._long:
                return "13-gram", self._long[gram]
        return None

    def _match_short(self, mine: Comparable) -> tuple[str, int] | None:
        shared: Counter[int] = Counter()
        for gram in mine.short_grams:
            shared.update(self._short.get(gram, ()))
        for number, count in shared.items():
            entry = self._entries[number]
            if f" {entry.joined} " in f" {mine.joined} " and len(entry.words) >= MIN_CONTAINED_WORDS:
                return "contains", number
            if f" {mine.joined} " in f" {entry.joined} " and len(mine.words) >= MIN_PART_WORDS:
                return "contains", number
            union = len(entry.short_grams) + len(mine.short_grams) - count
            covered = count / len(entry.short_grams)
            if len(entry.words) >= MIN_WORDS and (count / union >= JACCARD or covered >= COVERED):
                return "5-gram", number
        return None

    def _match_words(self, mine: Comparable) -> tuple[str, int] | None:
        if len(mine.distinct) < MIN_WORDS:
            return None
        shared: Counter[int] = Counter()
        for word in mine.distinct:
            shared.update(self._by_word.get(word, ()))
        for number, count in shared.most_common(5):
            entry = self._entries[number]
            union = len(entry.distinct) + len(mine.distinct) - count
            if len(entry.distinct) >= MIN_WORDS and count / union >= WORDS_SHARED:
                return "words", number
        return None

    def _match_function(self, mine: Comparable) -> tuple[str, int] | None:
        for name in mine.functions:
            for number in self._by_function.get(name, ()):
                entry = self._entries[number]
                smaller = min(len(entry.description), len(mine.description))
                shared = len(entry.description & mine.description)
                if not smaller or shared / smaller >= DOCSTRING_SHARED:
                    return "function", number
        for word in mine.distinct:
            if word.count("_") >= 2:
                for number in self._by_function.get(plain_name(word), ()):
                    return "function", number
        return None

    def _match_task(self, mine: Comparable) -> tuple[str, int] | None:
        candidates = {number for word in mine.description for number in self._by_description.get(word, ())}
        for number in sorted(candidates):
            theirs = self._entries[number].description
            shared = len(theirs & mine.description)
            if theirs == mine.description or (shared >= 2 and shared / len(theirs | mine.description) >= JACCARD):
                return "task", number
        return None

    def filter(self, prompts: Iterable[Prompt], report: DropReport | None = None) -> list[Prompt]:
        """The prompts that are clear of all evaluation prompts; the others are counted in `report`."""
        kept = []
        for prompt in prompts:
            match = self.match_prompt(prompt)
            if match is None:
                kept.append(prompt)
            elif report is not None:
                report.add(prompt.source, prompt.turns[0], match)
        return kept
