"""mbxp prompts, which come in twelve languages but not in Python, as Python function stubs.

The Go and TypeScript files write their examples as Python values already, Ruby and JavaScript nearly so. One stub comes
out for each task number, from the first of these languages whose prompt can be read in full.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from peagle.data.records import Record

LANGUAGES = ("go", "ruby", "javascript", "typescript")
_GO_TYPES = {"int": "int", "string": "str", "bool": "bool", "float64": "float"}
_SIGNATURE = {
    "go": re.compile(r"^func\s+(\w+)\s*\((.*)\)\s*(.*?)\s*\{", re.M),
    "ruby": re.compile(r"^def\s+(\w+)\s*\((.*)\)()", re.M),
    "javascript": re.compile(r"^function\s+(\w+)\s*\((.*)\)()\s*\{", re.M),
    "typescript": re.compile(r"^const\s+(\w+)\s*=\s*function\s*\((.*)\)\s*:\s*(.*?)\s*\{", re.M),
}
_LEADER = re.compile(r"^\s*(?:/\*\*?|\*/|//|##?|\*)?\s?")
_CALL = re.compile(r"^(?:>>>|>|irb>)\s*(.+)$")
_RESULT = re.compile(r"^(?:=>|>>>)\s*")
_TASK = re.compile(r"^Write (?:a|an)(?: \w[\w+#]*)? (?:function|method|program|code) (?:to|that|which|for) ", re.I)
_BOILERPLATE = re.compile(r"^(?:You are an expert|Code should be written|Examples:)", re.I)


@dataclass(frozen=True, slots=True)
class Task:
    """One task: Python parameters such as "n: int", examples as (call, result) in Python syntax."""

    name: str
    parameters: tuple[str, ...]
    returns: str | None
    description: str
    examples: tuple[tuple[str, str], ...]


def python_stubs(rows: Iterable[tuple[str, Record]]) -> Iterator[tuple[str, str]]:
    """Yield (place, stub) for each task number of an mbxp file, in the file's order; unreadable tasks are left out."""
    best: dict[str, tuple[int, str, Task]] = {}
    for place, row in rows:
        language = str(row.get("language"))
        if language not in LANGUAGES or not isinstance(row.get("prompt"), str):
            continue
        task = parse_task(row["prompt"], language)
        number = str(row.get("task_id", place)).rpartition("/")[2]
        rank = LANGUAGES.index(language)
        if task is not None and (number not in best or rank < best[number][0]):
            best[number] = (rank, place, task)
    for _rank, place, task in best.values():
        yield place, render_stub(task)


def render_stub(task: Task) -> str:
    """The task as `def name(args):` with a docstring of description and doctest examples, body left open."""
    arrow = f" -> {task.returns}" if task.returns else ""
    lines = [f"def {task.name}({', '.join(task.parameters)}){arrow}:", f'    """ {task.description}']
    for call, result in task.examples:
        lines += [f"    >>> {call}", f"    {result}"]
    stub = "\n".join([*lines, '    """', ""])
    return f"from typing import List\n\n\n{stub}" if "List[" in lines[0] else stub


def parse_task(prompt: str, language: str) -> Task | None:
    """Read one mbxp prompt in one of LANGUAGES; None when its signature or an example is not plain data."""
    signature = _SIGNATURE[language].search(prompt)
    if signature is None:
        return None
    found, name = signature[1], _snake(signature[1])
    parameters, returns = _parameters(signature[2], signature[3], language)
    if not name.isidentifier() or len(parameters) != len({p.split(":")[0] for p in parameters}):
        return None
    description: list[str] = []
    examples: list[tuple[str, str]] = []
    call: str | None = None
    for raw in prompt[: signature.start()].splitlines():
        if not re.match(r"\s*(?:/\*|\*|//|#)", raw):
            continue
        line = _LEADER.sub("", raw).strip()
        started = _CALL.match(line)
        if call is not None:
            result = _python_value(_RESULT.sub("", line), language)
            if result is None:
                return None
            examples.append((call, result))
            call = None
        elif started is not None:
            arguments = re.fullmatch(rf"{re.escape(found)}\s*(\(.*\))", started[1].strip())
            call = None if arguments is None else _python_call(name, arguments[1], language)
            if call is None:
                return None
        elif line and not _BOILERPLATE.match(line) and not examples:
            description.append(re.sub(r"^[*#]\s+", "", line))
    text = _TASK.sub("", " ".join(description).strip())
    if not text or not examples or call is not None or '"""' in text or "\\" in text:
        return None
    if any(_has_tuple(call) or _has_tuple(result) for call, result in examples):  # Go knows no tuples: List is wrong
        parameters, returns = [parameter.split(":")[0] for parameter in parameters], None
    return Task(name, tuple(parameters), returns, text[0].upper() + text[1:], tuple(examples))


def _has_tuple(expression: str) -> bool:
    return any(isinstance(node, ast.Tuple) for node in ast.walk(ast.parse(expression, mode="eval")))


def _snake(name: str) -> str:
    return re.sub(r"__+", "_", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name)).lower()


def _parameters(text: str, returns: str, language: str) -> tuple[list[str], str | None]:
    """Python parameters; type hints only where every Go type has a plain Python one, as half the world's code has."""
    parts = [part.strip() for part in re.split(r",(?![^<\[(]*[>\])])", text) if part.strip()]
    names = [_snake(re.split(r"[\s:=]", part)[0]) for part in parts]
    if language != "go":
        return names, None
    types = [_go_type(part.partition(" ")[2]) for part in parts]
    result = _go_type(returns)
    if result is None or None in types:
        return names, None
    return [f"{name}: {type_}" for name, type_ in zip(names, types, strict=True)], result


def _go_type(text: str) -> str | None:
    text = text.strip()
    if text.startswith("[]"):
        inner = _go_type(text[2:])
        return None if inner is None else f"List[{inner}]"
    return _GO_TYPES.get(text)


def _python_call(name: str, arguments: str, language: str) -> str | None:
    tree = _literal_tree(name + arguments, language)
    return None if tree is None or not isinstance(tree, ast.Call) else ast.unparse(tree)


def _python_value(text: str, language: str) -> str | None:
    tree = _literal_tree(text, language)
    return None if tree is None else ast.unparse(tree)


def _literal_tree(text: str, language: str) -> ast.expr | None:
    """Parse a value, or a call with values, that uses nothing but literals; None for anything else."""
    if language == "ruby":
        text = re.sub(r'("[^"]*"|\'[^\']*\')|=>', lambda match: match[1] or ":", text)
    if language in ("ruby", "javascript", "typescript"):
        words = {"nil": "None", "null": "None", "undefined": "None", "true": "True", "false": "False"}
        pattern = r'("[^"]*"|\'[^\']*\')|\b(nil|null|undefined|true|false)\b'
        text = re.sub(pattern, lambda match: match[1] or words[match[2]], text)
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return None
    values = [*tree.args] if isinstance(tree, ast.Call) else [tree]
    for value in values:
        try:
            ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, MemoryError):
            return None
    return tree
