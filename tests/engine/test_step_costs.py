"""What a step is taken to cost: measurements, what lies between them, and how they follow what is observed."""

from __future__ import annotations

import pytest

from peagle.engine.step_costs import OPTIMISM, StepCosts

K = 3


def test_between_and_beyond_measurements() -> None:
    costs = StepCosts(K)
    with pytest.raises(IndexError):
        costs.at(1, 0)
    costs.add(4, {0: 2.0, K: 5.0})
    assert [costs.at(n, 0) for n in (1, 4, 99)] == [2, 2, 2]
    assert [costs.at(4, k) for k in range(K + 1)] == [2, 3, 4, 5]
    costs.add(8, {0: 4.0, 1: 4.5, K: 8.5})
    assert [costs.at(n, 0) for n in (1, 4, 6, 8, 16)] == [2, 2, 3, 4, 8]
    assert [costs.at(8, k) for k in range(K + 1)] == [4, 4.5, 6.5, 8.5]
    costs.add(16, {0: 3.0, K: 9.0})  # less than at 8: then beyond it no less still
    assert [costs.at(n, 0) for n in (12, 16, 32)] == [3.5, 3, 3]


def test_both_ends_are_tried_first() -> None:
    costs = StepCosts(K)
    assert costs.untried() == K
    costs.observe(1, K, 2.0)
    assert costs.untried() == 0
    costs.observe(8, 0, 1.0)  # at another load: from the start
    assert costs.untried() == K
    costs.observe(7, K, 4.0)
    assert costs.untried() is None
    assert [costs.at(8, k) for k in (0, 1, 2, K)] == [1, 2, 3, 4]


def test_costs_follow_what_is_observed() -> None:
    costs = StepCosts(K)
    costs.add(1, {0: 1.0, K: 2.0})
    costs.add(8, {0: 2.0, K: 8.0})
    for _ in range(100):
        costs.observe(8, K, 12.0)
    assert costs.at(8, K) == pytest.approx(12, rel=0.01)
    for _ in range(300):
        costs.observe(6, 0, 3.0)
    assert costs.at(6, 0) == pytest.approx(3, rel=0.01)


def test_what_is_not_used_gets_cheaper_and_with_a_slow_machine_all_dearer() -> None:
    costs = StepCosts(K)
    costs.add(1, {0: 1.0, K: 2.0})
    costs.add(8, {0: 2.0, K: 8.0})
    for _ in range(1000):
        costs.observe(8, 0, 2.0)
    assert costs.at(8, 0) == pytest.approx(2)
    assert costs.at(8, K) == pytest.approx(8 * (1 - OPTIMISM) ** 1000, rel=0.01)
    assert costs.at(1, K) == pytest.approx(2)  # another load
    costs.observe(8, 0, 2.4)
    assert costs.at(1, K) > 2


def test_one_surprise_counts_little() -> None:
    costs = StepCosts(K)
    costs.add(1, {0: 1.0, K: 2.0})
    costs.observe(1, K, 1000.0)
    assert costs.at(1, K) < 2.2


def test_a_new_load_needs_two_looks_and_tells_of_all_k() -> None:
    costs = StepCosts(K)
    costs.add(1, {0: 1.0, K: 2.0})
    costs.observe(16, 0, 9.0)
    assert costs.numbers == [1]
    costs.observe(16, K, 9.0)  # another k is another shape
    costs.observe(16, 0, 4.0)
    assert costs.numbers == [1]
    costs.observe(16, 0, 3.0)
    assert costs.numbers == [1, 16]
    assert [costs.at(16, k) for k in (0, K)] == [3, 6]
    assert costs.at(1, 0) == 1
    for _ in range(2):
        costs.observe(64, K, 40.0)
    assert costs.numbers == [1, 16, 64]
    assert costs.at(64, K) == 40
    assert costs.at(64, 0) == 10  # a quarter of the rows
    assert costs.at(64, 1) == 20
    for _ in range(2):
        costs.observe(256, 1, 84.0)  # as expected
    assert costs.at(256, 0) == pytest.approx(10 + 7 / 48 * 192)
