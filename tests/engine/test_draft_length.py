"""The choice of the number of drafts, on made-up machines and texts whose best choice is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from peagle.engine.draft_length import PRIOR_RATE, DraftLength, StepCosts

K = 3
Cost = Callable[[int, int], float]  # of a step, by requests and drafts


def bound(limit: int, slope: float) -> Cost:
    """A step takes 1 up to so many rows, then slope a row more."""
    return lambda requests, k: 1.0 + slope * max(requests * (k + 1) - limit, 0)


class Machine:
    """Runs steps of R requests as the choice has it: drafts are accepted at `rate`, one after the other."""

    def __init__(self, cost: Cost, rate: float, seed: int = 0, timed: tuple[int, ...] = (1, 4, 16)) -> None:
        self.cost, self.rate = cost, rate
        self.length = DraftLength(K)
        self.length.make_up_seconds = 0.001
        self.random = random.Random(seed)
        for k in (0, K):
            for requests in timed:
                self.length.costs[k].seed(requests, cost(requests, k))
        self.standing: list[int] = []
        self.behind = 0

    def run(self, requests: int, steps: int) -> list[int]:
        """The k of each step."""
        chosen = []
        length = self.length
        self.standing = (self.standing + [0] * requests)[:requests]
        for _ in range(steps):
            length.steps += 1
            k = length.choose(requests, self.behind)
            wanted = [k] * requests
            if length.scouts(k):
                wanted[0] = K
            for drafted in self.standing:
                accepted = 0
                while accepted < drafted and self.random.random() < self.rate:
                    accepted += 1
                if drafted:
                    length.observe_drafts(drafted, accepted)
            if self.standing == wanted == [k] * requests:
                noise = 1 + self.random.uniform(-0.05, 0.05)
                length.observe_step(requests, k, self.cost(requests, k) * noise)
            self.behind = 0 if k else self.behind + requests
            self.standing = wanted
            chosen.append(k)
        return chosen


def share(chosen: list[int], *ks: int) -> float:
    return sum(k in ks for k in chosen) / len(chosen)


def test_expected_tokens_and_interpolated_costs() -> None:
    length = DraftLength(K)
    assert length.tokens(0) == 1
    assert length.tokens(2) == pytest.approx(1 + PRIOR_RATE + PRIOR_RATE**2)
    length.costs[0].seed(1, 1.0)
    length.costs[K].seed(1, 4.0)
    assert length.cost(1, 1) == pytest.approx(2.0)
    length.costs[1].seed(1, 1.5)
    assert length.cost(1, 1) == 1.5
    assert length.cost(1, 2) == pytest.approx(2.75)


def test_step_costs() -> None:
    costs = StepCosts()
    with pytest.raises(IndexError):
        costs.at(1)
    costs.seed(4, 2.0)
    assert costs.at(1) == costs.at(100) == 2.0
    costs.seed(8, 4.0)
    costs.seed(8, 6.0)  # was slower: the shortest counts
    assert [costs.at(n) for n in (1, 4, 6, 8, 16)] == [2, 2, 3, 4, 8]
    falling = StepCosts()
    falling.seed(4, 2.0)
    falling.seed(8, 1.0)
    assert [falling.at(n) for n in (4, 6, 8, 16)] == [2, 1.5, 1, 1]
    costs.observe(100, 70.0)
    assert costs.at(100) == 50  # the first may have been slow for a reason of its own
    costs.observe(90, 45.0)  # far from all others: a point of their own
    costs.seed(100, 50.0)
    assert costs.at(100) == 50
    before = costs.at(8)
    for _ in range(100):
        costs.observe(8, 10.0)
    assert before < costs.at(8) == pytest.approx(10, rel=0.01)
    assert costs.at(100) == 50


def test_both_ends_are_tried_before_anything_is_known() -> None:
    length = DraftLength(K)
    assert length.choose(1) == K
    for k in (K, 0):
        for _ in range(2):
            assert length.choose(1) == k
            length.observe_step(1, k, 1.0)
    assert length.choose(1) == K  # no dearer, so more is better


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("requests", [1, 2, 7, 16, 40])
def test_it_finds_the_best(requests: int, rate: float) -> None:
    """Nearly as many tokens a second as the best k would give, and never fewer than without drafts."""
    machine = Machine(bound(8, 0.08), rate)
    machine.run(requests, 400)
    chosen = machine.run(requests, 1600)

    def tokens(k: int) -> float:
        return sum(rate**i for i in range(k + 1))

    speeds = [tokens(k) / machine.cost(requests, k) for k in range(K + 1)]
    got = sum(tokens(k) for k in chosen) / sum(machine.cost(requests, k) for k in chosen)
    assert got > 0.95 * max(speeds)
    assert got > 0.99 * speeds[0]


def test_none_where_they_do_not_pay_and_back_when_the_load_falls() -> None:
    machine = Machine(bound(4, 0.2), 0.6)
    assert set(machine.run(1, 100)) <= {2, K}
    assert share(machine.run(16, 200), 0) > 0.95
    assert share(machine.run(1, 100), 2, K) > 0.95


@pytest.mark.parametrize("requests", [1, 16])
def test_back_when_the_text_gets_easier(requests: int) -> None:
    """Seen by scouts alone: one request in sixteen steps."""
    machine = Machine(lambda requests, k: 1 + 0.3 * k, 0.2)
    machine.run(requests, 2000)
    assert share(machine.run(requests, 500), 0) > 0.9
    machine.rate = 0.9
    machine.run(requests, 1500)
    assert share(machine.run(requests, 500), K) > 0.8


def test_back_when_costs_fall() -> None:
    """Which nothing that runs shows: it is tried again after a while."""
    machine = Machine(lambda requests, k: 1 + 0.7 * k, 0.6)
    machine.run(16, 500)
    assert share(machine.run(16, 200), 0) > 0.9
    machine.cost = lambda requests, k: 1 + 0.1 * k
    machine.run(16, 1500)
    assert share(machine.run(16, 500), 0) < 0.05
    machine.run(16, 5000)
    assert share(machine.run(16, 500), K) > 0.5


def test_a_slower_machine_changes_nothing() -> None:
    machine = Machine(bound(64, 0.1), 0.6)
    machine.run(4, 200)
    cost = machine.cost
    machine.cost = lambda requests, k: 3 * cost(requests, k)
    assert share(machine.run(4, 500), K) > 0.9


def test_no_drafts_for_a_gain_within_the_noise() -> None:
    machine = Machine(lambda requests, k: (1 + 0.6 * k) / 1.01, 0.6)
    assert share(machine.run(4, 2000), 0) > 0.8


def test_rows_to_make_up_are_part_of_the_price() -> None:
    machine = Machine(lambda requests, k: 1 + 0.1 * k, 0.6)
    assert machine.length.choose(4) == K
    assert machine.length.choose(4, rows_behind=1000) == K  # 1 s, for 64 steps of 1 s that get faster
    assert machine.length.choose(4, rows_behind=10_000) == K  # put off for 2500 steps: as many will come
    machine.length.make_up_seconds = 1.0
    assert machine.length.choose(4, rows_behind=0) == K
    assert machine.length.choose(4, rows_behind=1000) == 0


def test_scouts_come_in_intervals_and_not_where_all_draft_all() -> None:
    length = DraftLength(K)
    found = []
    for step in range(100):
        length.steps = step
        found.append(length.scouts(1))
    assert 5 <= sum(found) <= 7
    length.steps = 1000
    assert not length.scouts(K)
