"""The one error type that a user's own mistake raises."""


class InputError(ValueError):
    """Something the user gave is wrong; the message names the field, the value and what was expected."""
