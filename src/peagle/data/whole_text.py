"""Text that has a UTF-8: JSON's escapes and bytes of a command line can bring halves of characters that have none."""

from peagle.errors import InputError


def whole_text(text: str, place: str) -> str:
    """`text` as it is.

    Raises:
        InputError: it holds half a character, a surrogate without the other of its pair; `place` is named.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])
        raise InputError(
            f"{place}: holds half a character ({half}, a surrogate without the other of its pair), expected whole ones"
        ) from error
    return text
