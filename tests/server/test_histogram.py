"""Our histogram says what prometheus_client's says."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from peagle.server.histogram import FastHistogram
from peagle.server.request_metrics import BETWEEN_TOKENS, one_two_five


def test_the_same_text_as_the_clients_own() -> None:
    dice = random.Random(0)
    labels = {"model_name": 'a "model"', "engine": "0"}
    for buckets in (BETWEEN_TOKENS, tuple(one_two_five(1000))):
        theirs, ours = CollectorRegistry(), CollectorRegistry()
        known = Histogram("vllm:x", "Text.", list(labels), buckets=buckets, registry=theirs).labels(**labels)
        fast = FastHistogram("vllm:x", "Text.", labels, buckets)
        ours.register(fast)
        for value in (0, buckets[0], buckets[-1], *(dice.expovariate(1 / buckets[5]) for _ in range(200))):
            known.observe(value)
            fast.observe(value)
        created = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
        assert generate_latest(ours).decode().splitlines() == created


def test_several_at_once() -> None:
    one, three = (FastHistogram("x", "", {}, (1, 2)) for _ in range(2))
    three.observe(1.5, times=3)
    for _ in range(3):
        one.observe(1.5)
    assert (one.counts, one.sum) == (three.counts, three.sum) == ([0, 3, 0], 4.5)


def test_one_two_five() -> None:
    assert list(one_two_five(60)) == [1, 2, 5, 10, 20, 50]
    assert list(one_two_five(100)) == [1, 2, 5, 10, 20, 50, 100]
