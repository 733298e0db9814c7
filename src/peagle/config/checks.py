"""Checks that the configs share."""

from __future__ import annotations

from peagle.errors import InputError


def check_positive(name: str, value: object, or_none: bool = False) -> None:
    """Raises InputError naming the field."""
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: got {value!r}, expected a positive integer{' or None' if or_none else ''}")


def is_number(value: object) -> bool:
    """Whether it is an int or a float; True and False are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_window(value: object) -> None:
    """Raises InputError for what is no SpeculativeConfig's draft_window."""
    if value in ("auto", None):
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"draft_window: got {value!r}, expected a positive integer, 'auto' or null (all positions)")
