"""Messages as a chat template takes them. A message's content is a text, or a list of parts of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peagle.errors import InputError

Content = str | list[dict[str, str]]


def template_takes_parts(tokenizer: Any) -> bool:
    """Whether the chat template writes a message's list of parts itself, and the same for a single one as for its text.

    It is tried out: what stands in a template is a program.
    """
    if tokenizer is None or not tokenizer.chat_template:
        return False
    contents: tuple[Any, Any] = ("words", [{"type": "text", "text": "words"}])
    try:
        as_text, as_parts = (
            tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False)
            for content in contents
        )
    except Exception:  # templates raise whatever they like
        return False
    return bool(as_text == as_parts)


def content_of(texts: Sequence[str], takes_parts: bool) -> Content:
    """The content of a message in parts. Those that the template does not take are lines, as vLLM makes of them."""
    return [{"type": "text", "text": text} for text in texts] if takes_parts else "\n".join(texts)


def template_message(message: object, takes_parts: bool) -> dict[str, Any]:
    """One message of a Python user's conversation. Raises InputError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InputError(f"messages: got {message!r}, expected mappings with role and content")
    content = message.get("content")
    if not isinstance(content, (list, tuple)):
        return dict(message)
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise InputError(f"messages: got content {content!r}, expected parts {{'type': 'text', 'text': ...}} only")
    return {**message, "content": content_of([str(text) for text in texts], takes_parts)}
