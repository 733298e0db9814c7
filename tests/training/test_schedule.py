"""Packing, and the steps of an epoch."""

from __future__ import annotations

import numpy as np

from peagle.training.schedule import Schedule, pack_documents


def test_packs_hold_every_document_once_and_fit() -> None:
    lengths = np.random.default_rng(0).integers(2, 65, 3000)
    packs = pack_documents(lengths, 64, (0, 0))
    assert sorted(i for pack in packs for i in pack) == list(range(3000))
    assert max(lengths[pack].sum() for pack in packs) <= 64
    assert lengths.sum() / (64 * len(packs)) > 0.95
    assert packs == pack_documents(lengths, 64, (0, 0))
    assert packs != pack_documents(lengths, 64, (0, 1))


def test_schedule_counts_steps() -> None:
    lengths = np.full(10, 30)
    schedule = Schedule(np.arange(10), lengths, 64, 2, 0)
    assert len(schedule.epoch(0)) == 3
    assert schedule.steps_for(None, 2, None) == 6
    assert schedule.steps_for(None, None, 15) == 5  # 4 + 4 + 2, then 4 + 4
    assert schedule.steps_for(None, 1, 100) == 3
    assert schedule.steps_for(7, 10**9, None) == 7
    assert schedule.steps_for(7, 1, None) == 3
    assert schedule.steps_for(7, None, None) == 7
    assert schedule.steps_for(None, None, None) is None
    assert schedule.locate(7) == (2, 1)
