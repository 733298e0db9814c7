"""What a step takes, by its number of requests and the drafts of each: measured, and guessed between measurements.

By requests and not by rows alone, because attention costs by request: 16 requests of one row take longer than four of
four.
"""

from __future__ import annotations

from bisect import bisect_left

LOCAL, COMMON = 0.1, 0.2  # how fast a cost follows what is observed, and all the others with it
LARGEST_SURPRISE = 1.25  # a step that takes longer, or is faster, counts as this: something else went on
SETTLED = 50  # observations of one k in a row after which a surprise is the machine's and not that k's
OPTIMISM = 1 / 20000  # by how much an unused k gets cheaper a step: at 1 / 5000 trials took 2 % where no k pays
WHOLE = 0.25  # so near to a whole number of drafts counts as it, where nothing is known yet
SAME_LOAD = 1.5  # numbers of requests that differ by no more than this factor share a measurement


def is_near(a: float, b: float) -> bool:
    return a <= SAME_LOAD * b and b <= SAME_LOAD * a


class StepCosts:
    """Seconds of a step by k, 0 to max_drafts, at some numbers of requests; linear between and beyond them."""

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.numbers: list[int] = []  # of requests, ascending
        self.seconds: list[list[float]] = []  # at each of them, by k
        self._first: dict[int, float] = {}  # before there is a measurement: what was seen at a load, by k
        self._first_number = 1
        self._new: tuple[int, int, float] | None = None  # seen once, far from all measurements
        self._last_k, self._in_a_row = -1, 0  # what was observed last, and how often

    def untried(self) -> int | None:
        """A k to try before anything can be said: first all drafts, then none. None once both are known."""
        if self.numbers:
            return None
        return 0 if self.max_drafts in self._first else self.max_drafts

    def add(self, number: int, measured: dict[int, float]) -> None:
        """Enter what a step took at a number of requests, by k; 0 and max_drafts must be there, what lies between them
        and is missing is guessed."""
        known = sorted(measured)
        row = []
        for k in range(self.max_drafts + 1):
            above = next(j for j in known if j >= k)
            below = max(j for j in known if j <= k)
            share = (k - below) / (above - below) if above > below else 0.0
            row.append(measured[below] + share * (measured[above] - measured[below]))
        i = bisect_left(self.numbers, number)
        self.numbers.insert(i, number)
        self.seconds.insert(i, row)

    def at(self, number: int, k: int) -> float:
        """Expected seconds. Raises IndexError before anything is known."""
        x, last = self.numbers, len(self.numbers) - 1
        if number <= x[0] or last == 0:
            return self.seconds[0][k]
        i = min(bisect_left(x, number), last)
        before, here = self.seconds[i - 1][k], self.seconds[i][k]
        slope = (here - before) / (x[i] - x[i - 1])
        if number > x[i]:
            return here + max(slope, 0.0) * (number - x[i])
        return before + slope * (number - x[i - 1])

    def observe(self, number: int, mean: float, seconds: float) -> None:
        """Follow what a step took in which requests verified, and got, so many drafts in the mean."""
        k = round(mean)
        self._last_k, self._in_a_row = k, self._in_a_row + 1 if k == self._last_k else 0
        if not self.numbers:
            if abs(mean - k) > WHOLE:
                return
            if not is_near(number, self._first_number):
                self._first, self._first_number = {}, number
            self._first[k] = seconds
            if {0, self.max_drafts} <= self._first.keys():
                self.add(number, self._first)
            return
        if not any(is_near(number, x) for x in self.numbers):
            if abs(mean - k) <= WHOLE:
                self._observe_new(number, k, seconds)
            return
        parts = [max(1 - abs(mean - j), 0.0) for j in range(self.max_drafts + 1)]  # how much of each k it was
        expected = sum(part * self.at(number, j) for j, part in enumerate(parts))
        ratio = min(max(seconds / expected, 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
        settled = self._in_a_row >= SETTLED  # else what slows the machine down would make the other k look cheap
        for i, weight in self._around(number):
            self.seconds[i] = [
                cost * ratio ** (LOCAL * weight * (1.0 if settled else part)) * (1 - OPTIMISM * (1 - part))
                for cost, part in zip(self.seconds[i], parts, strict=True)
            ]
        self.seconds = [[cost * ratio**COMMON for cost in row] for row in self.seconds]

    def _observe_new(self, number: int, k: int, seconds: float) -> None:
        """At a load that was not seen before: the second look counts, since the first step of a shape is slower.

        A larger k is taken to be dearer or cheaper than expected by as much; of a smaller one the least is expected
        that it can be, its share of the rows, for what looks too dear is not tried.
        """
        before, self._new = self._new, (number, k, seconds)
        if before is None or before[1] != k or not is_near(number, before[0]):
            return
        seconds = min(seconds, before[2])
        ratio = seconds / self.at(number, k)
        row = {j: self.at(number, j) * ratio for j in range(self.max_drafts + 1)}
        for j in range(k):
            row[j] = min(row[j], max(self.at(number, j), seconds * (j + 1) / (k + 1)))
        self.add(number, row)
        self._new = None

    def _around(self, number: int) -> list[tuple[int, float]]:
        """The measurements on both sides of a number, with how near they are: 1 at it, down to 0."""
        i = bisect_left(self.numbers, number)
        if i == len(self.numbers) or i == 0 or self.numbers[i] == number:
            return [(min(i, len(self.numbers) - 1), 1.0)]
        share = (number - self.numbers[i - 1]) / (self.numbers[i] - self.numbers[i - 1])
        return [(i - 1, 1 - share), (i, share)]
