"""The choice of the number of drafts, on made-up machines and texts whose best choice is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from peagle.engine.draft_length import MARGIN, PRIOR_RATE, SCOUT_SHARE, DraftLength
from peagle.engine.step_costs import StepCosts

K = 3
Cost = Callable[[int, int], float]  # of a step, by requests and drafts


def bound(limit: int, slope: float) -> Cost:
    """A step takes 1 up to so many rows, then slope a row more."""
    return lambda requests, k: 1.0 + slope * max(requests * (k + 1) - limit, 0)


class Machine:
    """Runs steps of R requests as the choice has it: drafts are accepted at `rate`, one after the other.

    answer: after so many steps a request gives way to a new one.
    """

    def __init__(self, cost: Cost, rate: float, seed: int = 0, timed: tuple[int, ...] = (1, 4)) -> None:
        self.cost, self.rate = cost, rate
        self.length = DraftLength(K)
        self.length.make_up_seconds = 0.002
        self.random = random.Random(seed)
        for requests in timed:
            self.length.costs.add(requests, {k: cost(requests, k) for k in (0, K)})
        self.standing: list[int] = []
        self.behind: list[int] = []
        self.seconds = self.tokens = 0.0

    def run(self, requests: int, steps: int, answer: int = 200, prompt: int = 30) -> list[float]:
        """The mean number of drafts of each step."""
        chosen = []
        length = self.length
        self.standing = (self.standing + [0] * requests)[:requests]
        self.behind = (self.behind + [prompt] * requests)[:requests]
        self.seconds = self.tokens = 0.0
        for _ in range(steps):
            length.steps += 1
            k = length.choose(requests)
            order = sorted(range(requests), key=self.behind.__getitem__)
            joins = [i for i in order if k > 0 and length.pays(requests, k, self.behind[i], answer)]
            wanted = [k if i in joins else 0 for i in range(requests)]
            if length.scouts(requests, k if joins else 0, self.behind[order[0]]):
                wanted[order[0]] = K
            for drafted in self.standing:
                accepted = 0
                while accepted < drafted and self.random.random() < self.rate:
                    accepted += 1
                if drafted:
                    length.observe_drafts(drafted, accepted)
                self.tokens += 1 + accepted
            verified, proposed = sum(self.standing) / requests, sum(wanted) / requests
            mean = (verified + proposed) / 2
            low = min(int(mean), K - 1)
            below, above = self.cost(requests, low), self.cost(requests, low + 1)
            seconds = below + (mean - low) * (above - below)
            if abs(verified - proposed) <= 0.25:
                length.costs.observe(requests, mean, seconds * (1 + self.random.uniform(-0.05, 0.05)))
            made_up = sum(n for n, w in zip(self.behind, wanted, strict=True) if w)
            self.seconds += seconds + made_up * length.make_up_seconds
            self.behind = [0 if w else n + 1 for n, w in zip(self.behind, wanted, strict=True)]
            self.standing = wanted
            for i in range(requests):
                if self.random.random() < 1 / answer:
                    self.standing[i], self.behind[i] = 0, prompt
            chosen.append(sum(wanted) / requests)
        return chosen


def share(chosen: list[float], low: float, high: float) -> float:
    """Of the steps with so many drafts a request."""
    return sum(low <= k <= high for k in chosen) / len(chosen)


def test_expected_tokens() -> None:
    length = DraftLength(K)
    assert length.tokens(0) == 1
    assert length.tokens(2) == pytest.approx(1 + PRIOR_RATE + PRIOR_RATE**2)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("requests", [1, 2, 7, 16, 40])
def test_it_finds_the_best(requests: int, rate: float) -> None:
    """Nearly as many tokens a second as the best k would give, if that is worth it; hardly ever fewer than without."""
    machine = Machine(bound(8, 0.08), rate)
    machine.run(requests, 400)
    machine.run(requests, 1600)
    speeds = [requests * sum(rate**i for i in range(k + 1)) / machine.cost(requests, k) for k in range(K + 1)]
    got = machine.tokens / machine.seconds
    if max(speeds) > 1.05 * MARGIN * speeds[0]:
        assert got > 0.95 * max(speeds)
    assert got > 0.97 * speeds[0]


@pytest.mark.parametrize("requests", [1, 4, 16])
def test_short_answers_from_the_first_step_on(requests: int) -> None:
    """Where speculation does not pay, what is lost until that is known is little."""
    machine = Machine(lambda requests, k: 1 + 0.02 * requests * (1 + 3 * k), 0.5)
    machine.run(requests, 150, answer=24)
    assert machine.tokens / machine.seconds > 0.97 * requests / machine.cost(requests, 0)


def test_none_where_they_do_not_pay_and_back_when_the_load_falls() -> None:
    machine = Machine(bound(4, 0.2), 0.6)
    assert share(machine.run(1, 100), 2, K) > 0.95
    assert share(machine.run(16, 200), 0, 0.5) > 0.95
    assert share(machine.run(1, 100), 2, K) > 0.95


@pytest.mark.parametrize("requests", [1, 16])
def test_back_when_the_text_gets_easier(requests: int) -> None:
    """Seen by scouts alone."""
    machine = Machine(lambda requests, k: 1 + 0.3 * k, 0.2)
    machine.run(requests, 2000)
    assert share(machine.run(requests, 500), 0, 0.5) > 0.8
    machine.rate = 0.9
    machine.run(requests, 2000)
    assert share(machine.run(requests, 500), 2, K) > 0.8


def test_back_when_costs_fall() -> None:
    """Which nothing that runs shows: it is tried again after a while."""
    machine = Machine(lambda requests, k: 1 + 0.7 * k, 0.6)
    machine.run(16, 500)
    assert share(machine.run(16, 200), 0, 0.5) > 0.9
    machine.cost = lambda requests, k: 1 + 0.1 * k
    machine.run(16, 12000)
    assert share(machine.run(16, 500), 0, 0.5) < 0.05
    machine.run(16, 12000)
    assert share(machine.run(16, 500), 2, K) > 0.5


def test_a_slower_machine_changes_nothing() -> None:
    machine = Machine(bound(64, 0.1), 0.6)
    machine.run(4, 200)
    cost = machine.cost
    machine.cost = lambda requests, k: 3 * cost(requests, k)
    assert share(machine.run(4, 500), 2, K) > 0.95


def test_what_slows_down_plain_steps_makes_drafts_no_cheaper() -> None:
    """A client on the same cores: had only the plain steps, the only ones seen, become dearer, drafts would pay."""
    machine = Machine(lambda requests, k: 1 + 0.6 * k, 0.68)
    machine.run(16, 300)
    assert share(machine.run(16, 300), 0, 0.2) > 0.97
    cost = machine.cost
    machine.cost = lambda requests, k: 3 * cost(requests, k)
    assert share(machine.run(16, 300), 0, 0.2) > 0.97


@pytest.mark.parametrize("step", [0.6, 0.9, 1.5])
def test_what_trials_take_where_no_drafts_pay(step: float) -> None:
    machine = Machine(lambda requests, k: 1 + step * k, 0.68)
    machine.run(16, 300)
    tokens, seconds = machine.tokens, machine.seconds
    machine.run(16, 20000, answer=45, prompt=150)
    speed = (machine.tokens - tokens) / (machine.seconds - seconds)
    assert speed > 0.99 * 16 / machine.cost(16, 0)


def test_a_hiccup_changes_nothing() -> None:
    machine = Machine(lambda requests, k: 1 + 0.15 * k, 0.6)
    machine.run(4, 200)
    machine.length.costs.observe(4, K, 100.0)
    assert share(machine.run(4, 100), 1, K) > 0.9


def test_no_drafts_for_a_gain_within_the_noise() -> None:
    machine = Machine(lambda requests, k: (1 + 0.6 * k) / 1.01, 0.6)
    assert share(machine.run(4, 2000), 0, 0.5) > 0.5


def timed(cost: Cost, make_up_seconds: float = 0.01) -> DraftLength:
    length = DraftLength(K)
    length.costs.add(4, {k: cost(4, k) for k in (0, K)})
    length.make_up_seconds = make_up_seconds
    return length


def test_whether_drafting_pays_for_a_request() -> None:
    """Three drafts save (2.176 - 1.3) / 4 = 0.219 a step, and a row that is missing takes 0.01, by the margin 0.013."""
    length = timed(lambda requests, k: 1 + 0.1 * k)
    assert length.pays(4, K, 0, 1)
    assert length.pays(4, K, 1000, 2000)
    assert length.pays(4, K, 1000, 130)  # 59.7 steps
    assert not length.pays(4, K, 1000, 128)  # 58.8
    assert length.pays(4, K, 1400, 10_000)
    # for 100 tokens it does not pay to run a prompt of 5000 through the head; for as many steps it does
    assert not length.pays(4, K, 5000, 100)
    assert length.pays(4, K, 5000, 50_000)
    assert not timed(lambda requests, k: 1 + 0.4 * k).pays(4, K, 1, 1000)  # it never does
    assert DraftLength(K).pays(4, K, 10**6, 1)  # nothing is known yet


def test_scouts_take_a_share_of_the_time() -> None:
    length = timed(lambda requests, k: 1 + k)

    def sent(rows_behind: int) -> int:
        count = 0
        for _ in range(1000):
            length.steps += 1
            count += length.scouts(4, 1, rows_behind)
        return count

    share = 1000 * 2 * SCOUT_SHARE  # of the seconds of steps of 2
    assert sent(0) == pytest.approx(share / 0.5, abs=2)
    assert sent(150) == pytest.approx(share / 2.0, abs=2)
    length.costs = StepCosts(K)
    length.costs.add(4, {0: 1.0, K: 1.0})
    assert sent(0) == pytest.approx(1000 / 16, abs=1)  # they are not sent more often where they cost nothing
    assert not any(length.scouts(4, K, 0) for _ in range(1000))  # all draft all
    assert not any(DraftLength(K).scouts(4, 1, 0) for _ in range(1000))
