"""Requests that are taken in and are not in the engine yet: while their texts are tokenized they hold places, too."""

from __future__ import annotations

import asyncio
from types import TracebackType

from peagle.server.errors import ApiError


class Seats:
    """All that are held. Belongs to the event loop."""

    def __init__(self) -> None:
        self._held: set[Seat] = set()

    @property
    def num_held(self) -> int:
        """Places of all seats together."""
        return sum(seat.count for seat in self._held)

    def take(self, count: int) -> Seat:
        """A seat of so many places; whether there is room is the caller's to know."""
        seat = Seat(self, count)
        self._held.add(seat)
        return seat

    def release(self, seat: Seat) -> None:
        self._held.discard(seat)

    def fail_all(self, error: ApiError) -> None:
        """Tell an error to all who hold seats."""
        for seat in self._held:
            if not seat.failed.done():
                seat.failed.set_result(error)


class Seat:
    """Held until `release`, or the end of the `with`. failed: set when the holder is to be told an error."""

    def __init__(self, seats: Seats, count: int) -> None:
        self.count = count
        self.failed: asyncio.Future[ApiError] = asyncio.get_running_loop().create_future()
        self._seats = seats

    def __enter__(self) -> Seat:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        self._seats.release(self)
