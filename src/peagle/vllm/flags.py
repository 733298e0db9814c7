"""How vLLM lets its flags be spelled; it is told apart here which one `peagle serve` reads and writes itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

import yaml

from peagle.errors import InputError

SPECULATIVE = "--speculative-config"  # -sc for short; `--speculative-config.KEY VALUE` sets one key of its JSON
# vLLM reads a flag's unambiguous beginning as the flag; with less it could be --specialize-active-lora.
SHORTEST = "--specu"


def long_name(arg: str) -> str:
    """A flag's name without its value, one for all spellings that vLLM reads: hyphens for underscores; -sc, and what is
    cut short, in full."""
    name = arg.partition("=")[0]
    if name == "-sc" or name.startswith("-sc."):
        return SPECULATIVE + name.removeprefix("-sc")
    if not name.startswith("--"):
        return name
    first, dot, rest = name.partition(".")  # what follows a dot is a key of the JSON
    first = first.replace("_", "-")
    if first.startswith(SHORTEST) and SPECULATIVE.startswith(first):
        first = SPECULATIVE
    return first + dot + rest


def refuse_repeated(extra_args: Sequence[str]) -> None:
    """Refuse flags that this command writes itself, among those that go to vLLM as they are, and in the file that a
    --config among them names. Raises InputError."""
    for arg, following in zip_longest(extra_args, extra_args[1:], fillvalue=""):
        name = long_name(arg)
        if name == "--model":
            raise InputError(f"{arg}: given beside TARGET, expected the model as TARGET only")
        if name == SPECULATIVE:
            raise InputError(f"{arg}: given twice, expected it only as an argument of peagle serve")
        if names_head(name):
            raise InputError(f"{arg}: the head has to be known here, expected {SPECULATIVE} with JSON")
        if arg == "--config":
            refuse_head_in_file(following)


def names_head(name: str) -> bool:
    """Whether a flag, by its long name, says in one of vLLM's ways which head is taken and how."""
    # --spec-model, --spec-tokens and --spec-method stand for keys of the JSON
    return name == SPECULATIVE or name.startswith((f"{SPECULATIVE}.", "--spec-"))


def refuse_head_in_file(file: str) -> None:
    """Refuse a file of vLLM's flags that says which head is taken. What cannot be read is left for vLLM to refuse."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return
    for key in content if isinstance(content, dict) else ():
        if names_head(long_name(f"--{key}")) or key == "sc":
            raise InputError(
                f"--config {file}: {key}: the head has to be known here, expected {SPECULATIVE} with JSON beside it"
            )
