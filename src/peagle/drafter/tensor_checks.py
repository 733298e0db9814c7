"""What is wrong with a checkpoint's tensors by name and dtype: `peagle inspect` lists it, loading refuses the first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping

from peagle.drafter.layouts import module_name

FLOATS = ("bfloat16", "float16", "float32", "float64")
INTEGERS = ("int64", "int32", "int16", "int8", "uint8")
MAPPINGS = {"d2t": INTEGERS, "t2d": ("bool", *INTEGERS)}


def twin_problems(names: Iterable[str]) -> list[str]:
    """Tensors of a checkpoint, by their names in its files, that are one and the same tensor of a head.

    Alike or not: which of them counts hangs on who reads them, and headers do not tell whether they are alike.
    """
    found = defaultdict(list)
    for name in names:
        found[module_name(name)].append(name)
    return [
        f"{', '.join(sorted(twins))}: {name} under several names, expected one of them"
        for name, twins in found.items()
        if len(twins) > 1
    ]


def dtype_problems(dtypes: Mapping[str, str], expected: Container[str]) -> list[str]:
    """Tensors that cannot be computed with as they are stored.

    dtypes: torch's name of the dtype of each, under the module's names; expected: the names of a head's tensors, others
    are not judged here. An fp8 tensor is refused too: it is a quantised one, and its scales would not be read.
    """
    problems = []
    for name, dtype in dtypes.items():
        allowed = MAPPINGS.get(name, FLOATS)
        if dtype in allowed or (name not in MAPPINGS and name not in expected):
            continue
        why = "" if name in MAPPINGS else " (a quantised head is not read)"
        problems.append(f"{name}: dtype {dtype}, expected {', '.join(allowed[:-1])} or {allowed[-1]}{why}")
    return problems
