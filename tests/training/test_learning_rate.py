"""The learning rate's schedules."""

from __future__ import annotations

import pytest

from peagle.training.learning_rate import learning_rate_factor


def test_learning_rate() -> None:
    assert learning_rate_factor(0, 0.0, 10, 0.1) == pytest.approx(0.1)
    assert learning_rate_factor(9, 0.0, 10, 0.1) == pytest.approx(1.0)
    assert learning_rate_factor(50, 0.5, 10, 0.1) == pytest.approx(0.55)
    assert learning_rate_factor(99, 1.0, 10, 0.1) == pytest.approx(0.1)
    assert learning_rate_factor(0, 0.0, 0, 0.1) == pytest.approx(1.0)


def test_wsd_is_flat_then_linear() -> None:
    factors = [learning_rate_factor(50, p, 10, 0.1, 0.4) for p in (0.0, 0.6, 0.8, 1.0)]
    assert factors == pytest.approx([1.0, 1.0, 0.55, 0.1])
    assert learning_rate_factor(4, 0.0, 10, 0.1, 0.4) == pytest.approx(0.5)
    assert learning_rate_factor(50, 1.0, 10, 0.1, 0.0) == pytest.approx(1.0)
