"""How many drafts a request gets, chosen by load: the number that gives the most tokens a second.

A step of R requests with k drafts each gives R * (1 + the joint acceptance rates of the first k positions) tokens.
What it costs is measured, for every k by the number of requests: on a CPU further rows are nearly free while reading
the weights takes longest, and are not once arithmetic does. Both change while the engine runs, and what is not in use
is not observed. So now and then one request drafts all K, which shows how later positions fare, and the cost of a k
that is not used is taken to fall slowly until it looks worth a try, which shows what it costs.

Plain numbers only: the engine says what happened (`draft_planner`), this says what to do.
"""

from __future__ import annotations

from bisect import bisect_left

PRIOR_RATE = 0.6  # a position's acceptance once those before it were accepted, until there are data
PRIOR_WEIGHT = 8  # observations that the prior stands for
WINDOW = 200  # observations that the moving average of a rate goes over
SCOUT_EVERY = 16  # steps from one request that drafts all K to the next
SCOUT_WEIGHT = 1 / 32  # of an observation at a position that is seen by scouts only
MARGIN = 1.03  # speculation must promise so much more than plain decoding
LOCAL, COMMON = 0.15, 0.05  # how fast a cost follows what is observed, and all the others with it
OPTIMISM = 1 / 5000  # by how much an unused k gets cheaper a step
LARGEST_SURPRISE = 1.25  # a step that takes longer, or is faster, counts as this: something else went on
MAKE_UP_STEPS = 64  # over so many steps, or as many as were put off, making up the drafter's missing rows must pay


def is_near(a: int, b: int) -> bool:
    return a <= 1.5 * b and b <= 1.5 * a


class StepCosts:
    """Seconds of a step by its number of requests: measured at some numbers, linear between and behind them."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.seconds: list[float] = []
        self._first: tuple[int, float] | None = None  # seen once, at a number that is far from all others

    def at(self, number: float) -> float:
        """Raises IndexError before anything is known."""
        x, y = self.numbers, self.seconds
        if number <= x[0] or len(x) == 1:
            return y[0]
        i = min(bisect_left(x, number), len(x) - 1)
        slope = (y[i] - y[i - 1]) / (x[i] - x[i - 1])
        if number > x[i]:
            return y[i] + max(slope, 0.0) * (number - x[i])
        return y[i - 1] + slope * (number - x[i - 1])

    def seed(self, number: int, seconds: float) -> None:
        """Set a cost, or lower it: of several measurements the shortest was disturbed least."""
        i = bisect_left(self.numbers, number)
        if i < len(self.numbers) and self.numbers[i] == number:
            self.seconds[i] = min(self.seconds[i], seconds)
        else:
            self.numbers.insert(i, number)
            self.seconds.insert(i, seconds)

    def observe(self, number: int, seconds: float) -> float:
        """Let the costs around a number follow what was observed; returns observed over expected, within limits."""
        if not any(is_near(number, x) for x in self.numbers):
            # the first step of a shape is slower than those to come
            if self._first is not None and is_near(number, self._first[0]):
                self.seed(number, min(seconds, self._first[1]))
                self._first = None
            else:
                self._first = number, seconds
            return 1.0
        ratio = min(max(seconds / self.at(number), 1 / LARGEST_SURPRISE), LARGEST_SURPRISE)
        i = min(range(len(self.numbers)), key=lambda j: abs(self.numbers[j] - number))
        self.seconds[i] *= ratio**LOCAL
        for j in (i - 1, i + 1):  # its other neighbour less, by how far it is
            if 0 <= j < len(self.numbers) and (self.numbers[j] - number) * (self.numbers[i] - number) < 0:
                share = abs(number - self.numbers[i]) / abs(self.numbers[j] - self.numbers[i])
                self.seconds[j] *= ratio ** (LOCAL * share)
        return ratio

    def scale(self, factor: float) -> None:
        self.seconds = [s * factor for s in self.seconds]

    def relax(self, number: int) -> None:
        """Take the costs on both sides of a number, where nothing is observed now, to have fallen a little."""
        i = bisect_left(self.numbers, number)
        exact = i < len(self.numbers) and self.numbers[i] == number
        for j in (i,) if exact else (i - 1, i):
            if 0 <= j < len(self.numbers):
                self.seconds[j] *= 1 - OPTIMISM


class DraftLength:
    """The choice of k, 0 to max_drafts, for the engine's next drafts.

    rates: per position, how often it is accepted once those before it were. costs: by k, by requests; those of a k
    without a measurement lie between its neighbours'. make_up_seconds: of one drafter row that was put off.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.rates = [PRIOR_RATE] * max_drafts
        self.costs = [StepCosts() for _ in range(max_drafts + 1)]
        self.make_up_seconds = 0.0
        self.steps = 0
        self._seen = [0] * max_drafts  # observations of a position
        self._last = [0] * max_drafts  # the step of the last one
        self._scouted = 0

    def tokens(self, k: int) -> float:
        """Expected tokens of a request in a step with k drafts: the acceptance length at k."""
        total = joint = 1.0
        for rate in self.rates[:k]:
            joint *= rate
            total += joint
        return total

    def cost(self, num_requests: int, k: int) -> float:
        """Expected seconds of a step."""
        if self.costs[k].numbers:
            return self.costs[k].at(num_requests)
        known = [i for i, costs in enumerate(self.costs) if costs.numbers]
        below, above = max(i for i in known if i < k), min(i for i in known if i > k)
        low, high = self.costs[below].at(num_requests), self.costs[above].at(num_requests)
        return low + (high - low) * (k - below) / (above - below)

    def choose(self, num_requests: int, rows_behind: int = 0) -> int:
        """The k for so many requests, whose drafter rows are behind by rows_behind in all."""
        for k in (self.max_drafts, 0):
            if not self.costs[k].numbers:
                return k  # the two ends must be known, what lies between can be guessed
        make_up = rows_behind * self.make_up_seconds / max(MAKE_UP_STEPS, rows_behind / num_requests)
        speeds = [self.tokens(k) / (self.cost(num_requests, k) + make_up) for k in range(1, self.max_drafts + 1)]
        best = max(range(self.max_drafts), key=speeds.__getitem__)
        return best + 1 if speeds[best] * self.cost(num_requests, 0) > MARGIN else 0

    def scouts(self, k: int) -> bool:
        """Whether one request should draft all it may now, where the others draft k."""
        if k == self.max_drafts or self.steps - self._scouted < SCOUT_EVERY:
            return False
        self._scouted = self.steps
        return True

    def observe_drafts(self, drafted: int, accepted: int) -> None:
        """What became of one request's drafts: those behind the first that was rejected say nothing."""
        for i in range(min(drafted, accepted + 1)):
            self._seen[i] += 1
            weight = max(1 / (PRIOR_WEIGHT + self._seen[i]), 1 / WINDOW)
            if self.steps - self._last[i] >= SCOUT_EVERY:
                weight = max(weight, SCOUT_WEIGHT)
            self._last[i] = self.steps
            self.rates[i] += weight * ((i < accepted) - self.rates[i])

    def observe_step(self, num_requests: int, k: int, seconds: float) -> None:
        """What a step took in which every request verified k drafts and got k new ones."""
        ratio = self.costs[k].observe(num_requests, seconds)
        for other, costs in enumerate(self.costs):
            costs.scale(ratio**COMMON)
            if other != k:
                costs.relax(num_requests)

    def observe_make_up(self, rows: int, seconds: float) -> None:
        """What making up so many drafter rows took."""
        each = seconds / rows
        self.make_up_seconds += (each - self.make_up_seconds) * (0.2 if self.make_up_seconds else 1.0)
