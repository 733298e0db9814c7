"""Prompts: user turns read from files in the forms their authors published, or from the Hub.

Only what a user (or a system message) says is taken; answers found in a file are ignored, because every training answer
is written by the target.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle.data.hub import read_hub_records
from peagle.data.records import SUFFIXES, Record, read_records
from peagle.data.rerender import python_stubs
from peagle.data.whole_text import whole_text
from peagle.errors import InputError

TEMPLATES = {
    "complete_code": "Complete the following code.\n\n```\n{prompt}\n```",
    "complete_python": "Complete the following Python function.\n\n```python\n{prompt}\n```",
    "write_python": "Write this function in Python:\n\n{prompt}",
    "translate_python": "Solve this task in Python instead of the language it is given in:\n\n{prompt}",
    "explain_code": "Explain step by step how you would implement this, then write the code:\n\n{prompt}",
    "step_by_step": "{prompt}\n\nLet's think step by step.",
    "solve": "Solve the following problem and explain each step.\n\n{prompt}",
}
TRANSFORMS = ("python_stub",)
OPTIONS = ("limit", "join", "template", "transform", "field", "name", "where", "config")
_OPTION = re.compile(rf":(?=(?:{'|'.join(OPTIONS)})=)")
_NO_INPUT = {"", "<noinput>", "n/a", "none"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """User turns to be answered one after another; `prompt_id` depends on the source's name and the content only.

    `place` is where it was read, such as FILE:LINE, for messages; "" if nowhere.
    """

    prompt_id: str
    source: str
    turns: tuple[str, ...]
    system: str | None = None
    place: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """One `--prompts` argument; see `parse_source` for what the fields mean."""

    location: str
    name: str
    limit: int | None = None
    join: int = 1
    template: str | None = None
    transform: str | None = None
    field: str | None = None
    where: tuple[str, str] | None = None
    split: str = "train"
    config: str | None = None


def make_prompt(source: str, turns: Sequence[str], system: str | None = None, place: str = "") -> Prompt:
    """A prompt with its stable id (64 bits of a SHA-256 over source and content), all of it `whole_text`."""
    content = json.dumps([source, system, list(turns)], ensure_ascii=False)
    return Prompt(hashlib.sha256(content.encode()).hexdigest()[:16], source, tuple(turns), system, place)


def parse_source(spec: str) -> PromptSource:
    r"""Read `FILE[:option=value]...` or `hub:OWNER/NAME[:SPLIT[:FIELD]][:option=value]...`.

    Options:
        limit=N       at most N prompts: a fixed pseudo-random choice, the same on every run, smaller ones within larger
        join=N        N rows one after another are one conversation: all of their turns, for long contexts
        template=T    T is text holding {prompt} (`\n` for a new line), a built-in name (see TEMPLATES) or a text file
        transform=T   python_stub: mbxp rows become Python function stubs
        field=F       take this field, and do not recognise the form
        where=K=V     only rows whose field K is V, e.g. where=language=ruby
        name=S        name of the source in statistics and in prompt ids (default: the file's name without suffix)
        config=C      configuration of a Hub data set

    Raises:
        InputError: an unknown option or template, a limit or join that is not a positive number, or an option that
            would change nothing: config for a file, field beside transform; a name or template that is no UTF-8.
    """
    location, *rest = _OPTION.split(spec)
    options = dict(part.split("=", 1) for part in rest)
    split, field = "train", options.get("field")
    if location.startswith("hub:"):
        parts = location.removeprefix("hub:").split(":")
        if not parts[0] or len(parts) > 3:
            raise InputError(f"--prompts {spec!r}: expected hub:OWNER/NAME[:SPLIT[:FIELD]]")
        split = parts[1] if len(parts) > 1 and parts[1] else "train"
        field = parts[2] if len(parts) > 2 else field
        location, name = "hub:" + parts[0], parts[0]
    else:
        match = re.search(r":([A-Za-z_]+)=", location)
        if match:
            raise InputError(f"--prompts {spec!r}: unknown option {match[1]!r}, expected one of {', '.join(OPTIONS)}")
        name = Path(location).name
        for suffix in sorted(SUFFIXES, key=len, reverse=True):
            name = name.removesuffix(suffix)
        if "config" in options:
            raise InputError(f"--prompts {spec!r}: config={options['config']}: only for a hub: data set, not a file")
    for option in ("limit", "join"):
        value = options.get(option)
        if value is not None and not (value.isdecimal() and int(value) > 0):
            raise InputError(f"--prompts {spec!r}: {option}={value}: expected a positive whole number")
    transform = options.get("transform")
    if transform is not None and transform not in TRANSFORMS:
        raise InputError(f"--prompts {spec!r}: transform={transform}: expected one of {', '.join(TRANSFORMS)}")
    if transform is not None and field is not None:
        raise InputError(f"--prompts {spec!r}: field={field} beside transform={transform}, which reads its own fields")
    where = options.get("where")
    if where is not None and "=" not in where:
        raise InputError(f"--prompts {spec!r}: where={where}: expected where=FIELD=VALUE")
    template = options.get("template")
    name = options.get("name", f"{name}/{transform}" if transform else name)
    return PromptSource(
        location=location,
        name=whole_text(name, f"--prompts {spec!r}: name (by default the file's)"),
        limit=int(options["limit"]) if "limit" in options else None,
        join=int(options.get("join", 1)),
        template=None if template is None else load_template(template),
        transform=transform,
        field=field,
        where=None if where is None else (where.split("=", 1)[0], where.split("=", 1)[1]),
        split=split,
        config=options.get("config"),
    )


def load_template(value: str) -> str:
    r"""Template text from literal text with {prompt} (`\n` means a new line), a built-in name, or a file.

    Raises:
        InputError: it is none of these, or the file's text has no {prompt}.
    """
    if "{prompt}" in value:
        return whole_text(value.replace("\\n", "\n"), f"template {value!r}")
    if value in TEMPLATES:
        return TEMPLATES[value]
    if not Path(value).is_file():
        raise InputError(f"template {value!r}: expected text with {{prompt}}, a file, or one of {', '.join(TEMPLATES)}")
    text = Path(value).read_text(encoding="utf-8")
    if "{prompt}" not in text:
        raise InputError(f"template file {value}: expected {{prompt}} in it")
    return text


def load_prompts(sources: Iterable[str | PromptSource]) -> list[Prompt]:
    """Prompts of all sources, in order, without repeats of the same source and content.

    Raises:
        InputError: whatever `parse_source`, the readers or `turns_of` refuse; the message names file and line.
    """
    prompts: dict[str, Prompt] = {}
    for source in sources:
        parsed = parse_source(source) if isinstance(source, str) else source
        found = {prompt.prompt_id: prompt for prompt in _joined(_read_source(parsed), parsed.join)}
        if not found:
            raise InputError(f"prompt source {parsed.location}: no prompt left after `where` and `transform`")
        if parsed.limit is not None:
            kept = set(sorted(found)[: parsed.limit])  # ids are hashes, so their order is a fixed shuffle
            found = {key: prompt for key, prompt in found.items() if key in kept}
        prompts.update(found)
    return list(prompts.values())


def _joined(prompts: Iterator[Prompt], size: int) -> Iterator[Prompt]:
    """Conversations of `size` prompts each, the last of what is left, under the first one's system message."""
    while group := list(itertools.islice(prompts, size)):
        turns = [turn for prompt in group for turn in prompt.turns]
        yield group[0] if size == 1 else make_prompt(group[0].source, turns, group[0].system, group[0].place)


def _read_source(source: PromptSource) -> Iterator[Prompt]:
    if source.location.startswith("hub:"):
        rows = read_hub_records(source.location.removeprefix("hub:"), source.split, source.config)
    else:
        rows = read_records(source.location)
    if source.where is not None:
        key, value = source.where
        rows = ((place, row) for place, row in rows if str(row.get(key)) == value)
    if source.transform == "python_stub":
        for place, stub in python_stubs(rows):
            yield _templated(source, None, [whole_text(stub, f"{place}: field 'prompt'")], place)
        return
    for place, row in rows:
        system, turns = turns_of(row, place, source.field)
        yield _templated(source, system, turns, place)


def _templated(source: PromptSource, system: str | None, turns: Sequence[str], place: str) -> Prompt:
    if source.template is not None:  # only the first turn opens a task; later ones refer to what was said
        turns = [source.template.replace("{prompt}", turns[0].rstrip("\n")), *turns[1:]]
    return make_prompt(source.name, turns, system, place)


def turns_of(row: Record, place: str, field: str | None = None) -> tuple[str | None, list[str]]:
    """System message (or None) and user turns of a row, in a form recognised from its fields, or from `field` alone.

    Raises:
        InputError: no known field, or one that holds no text or half a character; `place` and the field are named.
    """
    if field is not None:
        if field not in row:
            raise InputError(f"{place}: no field {field!r}; the row has {', '.join(map(repr, row))}")
        return _turns_of_value(row[field], f"{place}: field {field!r}")
    if "instruction" in row:
        return None, [_instruction(row, place)]
    for key in ("turns", "messages", "conversations", "conversation", "question", "prompt", "text"):
        if row.get(key) is not None:
            return _turns_of_value(row[key], f"{place}: field {key!r}")
    raise InputError(
        f"{place}: none of the known fields (instruction, turns, messages, conversations, question, prompt, text); "
        f"the row has {', '.join(map(repr, row))}; name one with field="
    )


def _instruction(row: Record, place: str) -> str:
    instances = row.get("instances")
    given = instances[0].get("input") if isinstance(instances, list) and instances else row.get("input")
    instruction = _text(row["instruction"], f"{place}: field 'instruction'")
    if given is None or str(given).strip().lower() in _NO_INPUT:
        return instruction
    return whole_text(f"{instruction}\n\n{given}", f"{place}: field 'input'")


def _turns_of_value(value: Any, place: str) -> tuple[str | None, list[str]]:
    if isinstance(value, str):
        return None, [_text(value, place)]
    if not isinstance(value, list) or not value:
        raise InputError(f"{place}: expected text or a list of turns, got {str(value)[:60]!r}")
    if all(isinstance(turn, str) for turn in value):
        return None, [_text(turn, place) for turn in value]
    system, turns = None, []
    for message in value:
        if not isinstance(message, dict):
            raise InputError(f"{place}: expected messages with a role and content, got {str(message)[:60]!r}")
        role = message.get("role", message.get("from"))
        if role == "system":
            system = _content(message, place)
        elif role in ("user", "human"):
            turns.append(_content(message, place))
    if not turns:
        raise InputError(f"{place}: no message with role 'user' (or from 'human')")
    return system, turns


def _content(message: Record, place: str) -> str:
    content = message.get("content", message.get("value"))
    if isinstance(content, list):  # parts, as in the OpenAI API; only text parts make sense here
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return _text(content, place)


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place}: expected text, got {type(value).__name__}")
    if not value.strip():
        raise InputError(f"{place}: empty text")
    return whole_text(value, place)
