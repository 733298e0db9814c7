"""Rows of a data set on the Hugging Face Hub, through the optional `datasets` library."""

from collections.abc import Iterator
from typing import Any

from peagle.errors import InputError


def read_hub_records(
    name: str, split: str = "train", config: str | None = None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (place, row) of Hub data set `owner/name`, or of a local folder in a form `datasets` can load.

    Raises:
        InputError: the `datasets` library is not installed, or it cannot load the data set (its reason is repeated).
    """
    try:
        import datasets
    except ImportError as error:
        raise InputError(
            f"hub:{name} needs the `datasets` library, which is not installed: pip install 'peagle[train]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # the library raises its own, requests' and fsspec's errors; all mean "cannot load"
        raise InputError(f"hub:{name} (split {split!r}): cannot be loaded: {type(error).__name__}: {error}") from error
    number = 0
    for number, row in enumerate(rows, start=1):
        yield f"hub:{name}:{split}: row {number}", dict(row)
    if not number:
        raise InputError(f"hub:{name} (split {split!r}): no rows in it")
