"""Server-sent events out of the bytes of a stream, as the OpenAI API uses them."""

from __future__ import annotations


class EventBuffer:
    """Collects bytes and gives the data of every event that is complete. Comments (keep-alive pings) are dropped."""

    def __init__(self) -> None:
        self._pending = b""

    def push(self, received: bytes) -> list[str]:
        """The data of the events that these bytes complete, in order; an event's lines are joined by line ends."""
        self._pending += received
        # a lone \r at the end may be half of a \r\n
        text, held = self._pending, b""
        if text.endswith(b"\r"):
            text, held = text[:-1], b"\r"
        *events, rest = text.replace(b"\r\n", b"\n").split(b"\n\n")
        self._pending = rest + held
        found = []
        for event in events:
            lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                found.append(b"\n".join(lines).decode("utf-8", "replace"))
        return found

    @property
    def rest(self) -> str:
        """What came after the last complete event."""
        return self._pending.decode("utf-8", "replace").strip()
