"""Target states kept on the device between epochs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle.drafter.loading import load_drafter
from peagle.errors import InputError
from peagle.training import prepare, target_states
from peagle.training.checkpoints import checkpoint_folders, load_latest
from peagle.training.state_cache import Placed, StateCache
from peagle.training.trainer import train_on

from .helpers import listed_answers, tiny_target
from .test_trainer import config, quiet


def test_gives_back_what_it_was_given_in_any_packing() -> None:
    aux, hidden = torch.randn(12, 6), torch.randn(12, 2)
    cache = StateCache(1 << 20, 100)
    cache.put([Placed(7, 0, 5), Placed(3, 6, 4)], aux, hidden)
    assert cache.get([Placed(1, 5, 2)], 12) is None
    part = [Placed(1, 0, 2), Placed(7, 2, 5)]
    found = cache.get(part, 8)
    assert found is not None
    assert torch.equal(found[0], torch.cat((torch.zeros(2, 6), aux[:5], torch.zeros(1, 6))))
    assert cache.missing(part) == part[:1]
    got = cache.get([Placed(3, 1, 4), Placed(7, 8, 5)], 16)
    assert got is not None
    for values, of in zip(got, (aux, hidden), strict=True):
        zero = torch.zeros(1, of.shape[1])
        assert torch.equal(values, torch.cat((zero, of[6:10], zero, zero, zero, of[:5], zero, zero, zero)))


def test_keeps_no_more_than_its_room() -> None:
    cache = StateCache(5 * 8 * 4, 100)
    cache.put([Placed(0, 0, 4), Placed(1, 4, 4), Placed(2, 8, 1)], torch.ones(9, 6), torch.ones(9, 2))
    assert sorted(cache.starts) == [0, 2]
    cache.put([Placed(0, 0, 4), Placed(3, 8, 1)], torch.zeros(9, 6), torch.zeros(9, 2))
    assert sorted(cache.starts) == [0, 2]
    assert cache.get([Placed(3, 0, 1)], 1) is None
    kept = cache.get([Placed(0, 0, 4)], 5)
    assert kept is not None
    assert kept[0].sum() == 24


def test_takes_memory_once_and_no_more_than_all_tokens_need() -> None:
    cache = StateCache(1 << 30, 9)
    cache.put([Placed(0, 0, 4)], torch.ones(9, 6), torch.ones(9, 2))
    assert cache.rows is not None
    assert [len(rows) for rows in cache.rows] == [10, 10]
    rows = cache.rows
    cache.put([Placed(1, 4, 5)], torch.ones(9, 6), torch.ones(9, 2))
    assert cache.rows is rows
    assert cache.get([Placed(1, 0, 5), Placed(0, 5, 4)], 9) is not None


def test_more_than_the_memory_holds_names_the_flag() -> None:
    cache = StateCache(1 << 58, 1 << 50)
    with pytest.raises(InputError, match="lower --state-cache-gib"):
        cache.put([Placed(0, 0, 4)], torch.ones(9, 6), torch.ones(9, 2))


@pytest.mark.parametrize("gib", [0.0, 2e-5, 1.0])
def test_a_run_of_several_epochs_gives_the_same_head(tmp_path: Path, gib: float, monkeypatch: Any) -> None:
    """Also when only some documents fit: a step's states come from one place and the other."""
    target, answers = tiny_target(), listed_answers(20)
    real, computed, caches = target_states.encode_packs, [0], []

    def counting(target: Any, groups: Any, *more: Any) -> Any:
        computed[0] += sum(len(group.row_starts) for group in groups)
        return real(target, groups, *more)

    def watched(*args: Any) -> StateCache:
        caches.append(StateCache(*args))
        return caches[0]

    monkeypatch.setattr(target_states, "encode_packs", counting)
    monkeypatch.setattr(prepare, "StateCache", watched)
    settings = config(tmp_path / "cached", max_steps=None, epochs=3, state_cache_gib=gib, validation_documents=0)
    train_on(settings, target, answers, say=quiet)
    kept = len(caches[0].starts)
    assert kept in {0.0: range(1), 2e-5: range(1, 20), 1.0: range(20, 21)}[gib]
    assert computed[0] == kept + 3 * (20 - kept), "the others alone in every epoch"
    train_on(config(tmp_path / "plain", max_steps=None, epochs=3, validation_documents=0), target, answers, say=quiet)
    one, other = (load_drafter(tmp_path / name / "head").state_dict() for name in ("cached", "plain"))
    assert all(torch.allclose(one[name].float(), other[name].float(), atol=1e-2) for name in one)


def test_long_packs_are_kept_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, where a step's packs together are too large to be held."""
    monkeypatch.setattr(target_states, "ENCODE_BYTES", 1)
    real, calls = target_states.encode_packs, []

    def counting(*args: Any) -> Any:
        calls.append(1)
        return real(*args)

    monkeypatch.setattr(target_states, "encode_packs", counting)
    settings: dict[str, Any] = {"max_steps": None, "epochs": 3, "validation_documents": 0}
    results = [
        train_on(config(tmp_path / str(gib), state_cache_gib=gib, **settings), tiny_target(), listed_answers(20))
        for gib in (1.0, 0.0)
    ]
    assert results[0] is not None
    kept, packs = divmod(len(calls), 4)
    assert packs == 0, "the first epoch with a cache, three without"
    assert kept > results[0].steps // 3, "several packs a step"
    one, other = (load_drafter(tmp_path / gib / "head").state_dict() for gib in ("1.0", "0.0"))
    assert all(torch.allclose(one[name].float(), other[name].float(), atol=1e-2) for name in one)


@pytest.mark.parametrize("gib", [2e-5, 1.0])
def test_a_run_resumed_in_a_later_epoch_ends_the_same(tmp_path: Path, gib: float) -> None:
    """Bit for bit, though its documents are computed in the company of other ones than those of the first epoch."""
    settings: dict[str, Any] = {
        "max_steps": None, "epochs": 3, "state_cache_gib": gib, "validation_documents": 0, "warmup_steps": 0,
        "save_every": 1, "keep_checkpoints": 100,
    }  # fmt: skip
    result = train_on(config(tmp_path / "whole", **settings), tiny_target(), listed_answers(20), say=quiet)
    assert result is not None
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for later in checkpoint_folders(tmp_path / "part" / "checkpoints")[: result.steps - result.steps // 3 - 1]:
        shutil.rmtree(later)
    said: list[str] = []
    train_on(config(tmp_path / "part", **settings), tiny_target(), listed_answers(20), say=said.append)
    assert f"resumed at step {result.steps // 3 + 1}" in said
    whole, part = (load_latest(tmp_path / name / "checkpoints") for name in ("whole", "part"))
    assert whole is not None
    assert part is not None
    torch.testing.assert_close(part["drafter"], whole["drafter"], rtol=0, atol=0)


def test_negative_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="state_cache_gib"):
        config(tmp_path, state_cache_gib=-1.0)
