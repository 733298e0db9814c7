"""What one `peagle data generate` is to do, and what is refused of it before its target is loaded."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from peagle.data.answers import AnswerSettings
from peagle.data.answers import sampling_of as answer_sampling
from peagle.data.self_prompts import SelfPromptGroup, SelfPromptSettings
from peagle.data.self_prompts import sampling_of as turn_sampling
from peagle.errors import InputError


@dataclass(frozen=True, slots=True)
class GenerateJob:
    """What to generate. `part` (i, n) of n processes side by side takes its share of every prompt source, i from 1."""

    output: Path
    prompts: tuple[str, ...] = ()
    self_prompts: tuple[SelfPromptGroup, ...] = ()
    exclude: tuple[str, ...] = ()
    part: tuple[int, int] = (1, 1)
    answers: AnswerSettings = field(default_factory=AnswerSettings)
    turns: SelfPromptSettings = field(default_factory=SelfPromptSettings)
    rows_per_shard: int = 4096
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    retry_refused: bool = False


def parse_part(text: str) -> tuple[int, int]:
    """Read `I/N`, I from 1 to N.

    Raises:
        InputError: anything else.
    """
    first, slash, count = text.partition("/")
    if not (slash and first.isdecimal() and count.isdecimal() and 1 <= int(first) <= int(count)):
        raise InputError(f"--shard {text!r}: expected I/N with I from 1 to N, e.g. 1/4")
    return int(first), int(count)


def in_part(key: str, part: tuple[int, int]) -> bool:
    """Whether a prompt id belongs to part (i, n)."""
    return int(key, 16) % part[1] == part[0] - 1


def file_name(name: str) -> str:
    """A group's name with what a file name cannot hold replaced."""
    return "".join(char if char.isalnum() or char in "-_." else "_" for char in name)


def check_job(job: GenerateJob) -> None:
    """Refuse what could only fail later, with the target loaded.

    Raises:
        InputError: nothing to answer, settings that no request could have, two groups with one file.
    """
    if not job.prompts and not job.self_prompts:
        raise InputError("nothing to answer: give --prompts, --self-prompts or both")
    if job.answers.loop_limit < 0:
        raise InputError(f"--loop-limit {job.answers.loop_limit}: expected 0 (never) or more")
    with _named_as_option("--"):
        for temperature, _share in job.answers.temperatures:
            answer_sampling(job.answers, temperature)
    with _named_as_option("--self-"):
        turn_sampling(job.turns)
        for group in job.self_prompts:
            turn_sampling(group_turns(job, group))
    # Each group's prompts are kept in a file of its name; two in one would be taken for each other.
    files = Counter(file_name(group.name) for group in job.self_prompts)
    if twice := [name for name, count in files.items() if count > 1]:
        raise InputError(f"--self-prompts: {files[twice[0]]} groups are called {twice[0]!r}; give each a name=NAME")


@contextmanager
def _named_as_option(prefix: str) -> Iterator[None]:
    """An error of a sampling parameter as one of the option that sets it: `top_p: ...` is `--top-p: ...`."""
    try:
        yield
    except InputError as error:
        name, _, rest = str(error).partition(":")
        raise InputError(f"{prefix}{name.replace('_', '-')}:{rest}") from error


def group_turns(job: GenerateJob, group: SelfPromptGroup) -> SelfPromptSettings:
    """How a group's prompts are sampled: at its own temperature if it has one."""
    return job.turns if group.temperature is None else replace(job.turns, temperature=group.temperature)
