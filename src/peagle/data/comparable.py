"""What of a text is compared with evaluation prompts: words, runs of words, functions, and what code is to do."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

SHORT_GRAM = 5
MAX_REQUEST_WORDS = 60

_WORD = re.compile(r"\w+")
_DEFINITION = re.compile(
    r"\b(?:def|func|function|fun)\s+(\w+)\s*\(|^sub\s+(\w+)|\b(\w+)\s*=\s*function\b|(?:>>>|>|irb>)\s*(\w+)\s*\(|"
    r"`(\w+)\(|\b(?:function|method)(?:\s+(?:called|named))?\s+`(\w+)`|\bfunction\s+(?:called|named)\s+(\w+)",
    re.MULTILINE,
)
_DOCSTRING = re.compile(r'"""(.*?)(?:>>>|""")|\'\'\'(.*?)(?:>>>|\'\'\')', re.S)
_COMMENT = re.compile(r"^\s*(?:/\*\*?|\*|//+|#+(?!include))\s*(.*\w.*)$")
_EXAMPLE = re.compile(r">>>|^\s*(?:\*|//+|#)\s*(?:php |irb)?>|\bexamples?:", re.I)
_BOILERPLATE = re.compile(r"\byou are an expert\b|\bcode should be written\b", re.I)
_ASKS_FOR_CODE = re.compile(r"\b(?:functions?|program|code|script|method|python)\b", re.I)
_STOP_WORDS = frozenset(
    _WORD.findall(
        """
        an and are as at be by for from function given ha has have in is it its thi list method of on or python return
        returns string should than that the their them then there these this to was which will with write
        you your if not element number find using program input output true false otherwise check
        whether implement create code script take determine into th nth ruby perl php go golang java javascript
        typescript scala kotlin swift example can please how do me my we could would provide snippet help need
        following
        """
    )
)


@dataclass(slots=True)
class Comparable:
    """A turn as the rules compare it. functions: that it defines or names; description: content words of their task."""

    source: str
    text: str
    words: list[str]
    distinct: frozenset[str]
    joined: str
    short_grams: frozenset[str]
    functions: frozenset[str]
    description: frozenset[str]


def normalise(text: str) -> list[str]:
    """Lower-case words and numbers of a text, without punctuation and with compatibility characters unified."""
    return _WORD.findall(unicodedata.normalize("NFKC", text).lower().replace("'", "").replace("\u2019", ""))


def comparable(source: str, text: str) -> Comparable:
    """A turn of `source`, read."""
    words = normalise(text)
    functions = {plain_name(name) for groups in _DEFINITION.findall(text) for name in groups if name}
    return Comparable(
        source=source,
        text=text,
        words=words,
        distinct=frozenset(words),
        joined=" ".join(words),
        short_grams=frozenset(grams(words, SHORT_GRAM)),
        functions=frozenset(functions),
        description=_description(text, words),
    )


def _description(text: str, words: list[str]) -> frozenset[str]:
    """Content words of what the code is to do: docstrings, else comments before the examples, else a short request."""
    documented = " ".join(part for groups in _DOCSTRING.findall(text) for part in groups)
    if not documented:
        for line in text.splitlines():
            if _EXAMPLE.search(line):
                break
            comment = _COMMENT.match(line)
            if comment and not _BOILERPLATE.search(line):
                documented += " " + comment[1]
    if not documented and len(words) <= MAX_REQUEST_WORDS and _ASKS_FOR_CODE.search(text):
        documented = text
    stems = (word.removesuffix("s") if len(word) > 3 else word for word in normalise(documented))
    return frozenset(stem for stem in stems if len(stem) > 1 and stem not in _STOP_WORDS)


def plain_name(name: str) -> str:
    """The same for `hasCloseElements` and `has_close_elements`."""
    return name.replace("_", "").lower()


def grams(words: Sequence[str], size: int) -> list[str]:
    """All runs of `size` words."""
    return [" ".join(words[i : i + size]) for i in range(len(words) - size + 1)]
