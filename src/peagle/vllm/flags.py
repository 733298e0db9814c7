"""How vLLM lets its flags be spelled; it is told apart here which one `peagle serve` reads and writes itself."""

from __future__ import annotations

SPECULATIVE = "--speculative-config"  # -sc for short; `--speculative-config.KEY VALUE` sets one key of its JSON


def long_name(arg: str) -> str:
    """A flag's name without its value, one for all spellings that vLLM reads: hyphens for underscores, -sc in full."""
    name = arg.partition("=")[0]
    if name == "-sc" or name.startswith("-sc."):
        return SPECULATIVE + name.removeprefix("-sc")
    first, dot, rest = name.partition(".")  # what follows a dot is a key of the JSON
    return first.replace("_", "-") + dot + rest if name.startswith("--") else name
