"""How many drafts a request gets, chosen by load: the number that gives the most tokens a second.

A step of R requests with k drafts each gives R * (1 + the joint acceptance rates of the first k positions) tokens.
What it costs is measured (`step_costs`): on a CPU further rows are nearly free while reading the weights takes longest,
and are not once arithmetic does. Both change while the engine runs, and what is not in use is not observed. So now and
then one request drafts all K, which shows how later positions fare; and the cost of a k that is not used is taken to
fall slowly until it looks worth a try, which shows what it costs.

Plain numbers only: the engine says what happened (`draft_planner`), this says what to do.
"""

from __future__ import annotations

from peagle.engine.step_costs import StepCosts

PRIOR_RATE = 0.6  # a position's acceptance once those before it were accepted, until there are data
PRIOR_WEIGHT = 8  # observations that the prior stands for
WINDOW = 200  # observations that the moving average of a rate goes over
RARE = 16  # steps at least from one scout to the next: a position that was not seen for so long is seen by them only,
RARE_WEIGHT = 1 / 16  # and each of these counts for more
SCOUT_SHARE = 1 / 500  # of the time goes into scouts, at most
# Speculation must promise so much more than plain decoding. What it gives falls short of what one step promises: rows
# of the drafter must be made up, and requests that end at different times leave small batches, dearer a token. On two
# cores a server of 16 users that was promised 1.2 by one draft each got 0.97 (docs/benchmarks.md).
MARGIN = 1.3
STEPS_AHEAD = 64  # a request is taken to go on for so many steps, or as many as it has behind it, if it may


class DraftLength:
    """The choice of k, 0 to max_drafts, for the engine's next drafts.

    rates: per position, how often it is accepted once those before it were. costs: of a step. make_up_seconds: of one
    drafter row that was put off.
    """

    def __init__(self, max_drafts: int) -> None:
        self.max_drafts = max_drafts
        self.rates = [PRIOR_RATE] * max_drafts
        self.costs = StepCosts(max_drafts)
        self.make_up_seconds = 0.0
        self.steps = 0
        self._seen = [0] * max_drafts  # observations of a position
        self._last = [0] * max_drafts  # the step of the last one
        self._scout_seconds = 0.0  # that scouts may take
        self._scouted = 0  # the step of the last one

    def tokens(self, k: int) -> float:
        """Expected tokens of a request in a step with k drafts: the acceptance length at k."""
        total = joint = 1.0
        for rate in self.rates[:k]:
            joint *= rate
            total += joint
        return total

    def choose(self, num_requests: int) -> int:
        """The k for so many requests."""
        if (untried := self.costs.untried()) is not None:
            return untried
        speeds = [self.tokens(k) / self.costs.at(num_requests, k) for k in range(self.max_drafts + 1)]
        best = max(range(1, self.max_drafts + 1), key=speeds.__getitem__)
        return best if speeds[best] > MARGIN * speeds[0] else 0

    def pays(self, num_requests: int, k: int, rows_behind: int, tokens_left: int) -> bool:
        """Whether drafting pays for a request whose drafter rows are rows_behind, and which may get tokens_left more.

        What k drafts for one request more cost a step, and the rows once, against what the tokens would cost plainly;
        by the margin, because most requests end before they have all the tokens that they may get.
        """
        if rows_behind == 0 or self.costs.untried() is not None:
            return True
        tokens = self.tokens(k)
        saved = (tokens * self.costs.at(num_requests, 0) - self.costs.at(num_requests, k)) / num_requests
        steps = min(max(STEPS_AHEAD, rows_behind), tokens_left / tokens)
        return saved * steps > MARGIN * rows_behind * self.make_up_seconds

    def scouts(self, num_requests: int, k: int, rows_behind: int) -> bool:
        """Whether a request that is rows_behind should draft all it may now, where the others draft k."""
        if k == self.max_drafts or self.costs.untried() is not None:
            return False
        now = self.costs.at(num_requests, k)
        price = (self.costs.at(num_requests, self.max_drafts) - now) / num_requests
        self._scout_seconds += SCOUT_SHARE * now
        too_dear = self._scout_seconds < price + rows_behind * self.make_up_seconds
        if too_dear or self.steps - self._scouted < RARE:
            return False
        self._scout_seconds, self._scouted = 0.0, self.steps
        return True

    def observe_drafts(self, drafted: int, accepted: int) -> None:
        """What became of one request's drafts: those behind the first that was rejected say nothing."""
        for i in range(min(drafted, accepted + 1)):
            self._seen[i] += 1
            weight = max(1 / (PRIOR_WEIGHT + self._seen[i]), 1 / WINDOW)
            if self.steps - self._last[i] >= RARE:
                weight = max(weight, RARE_WEIGHT)
            self._last[i] = self.steps
            self.rates[i] += weight * ((i < accepted) - self.rates[i])

    def observe_make_up(self, rows: int, seconds: float) -> None:
        """What making up so many drafter rows took."""
        each = seconds / rows
        self.make_up_seconds += (each - self.make_up_seconds) * (0.2 if self.make_up_seconds else 1.0)
