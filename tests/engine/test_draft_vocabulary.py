"""Drafts from the listed tokens and those of the texts: fewer to choose from, and the same output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from peagle.config.speculative import SpeculativeConfig
from peagle.drafter import Drafter, save_drafter
from peagle.drafter.draft_vocabulary import FILE, write_draft_vocabulary
from peagle.engine.loading import load_bound_drafter, load_engine, prepare_drafter
from peagle.errors import InputError
from peagle.target import Target, load_target
from tests.engine.helpers import SEQUENCES, assert_same, greedy, make_engine, run, tiny_head

KINDS = pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for 20 tokens of the texts, of which the tests' hold more."""
    monkeypatch.setattr("peagle.drafter.draft_vocabulary.RECENT", 20)


def narrowed(target: Target, kind: str, listed: int = 30, **over: bool) -> Drafter:
    head = tiny_head(target, kind, **over)
    return prepare_drafter(head, target, listed=torch.arange(0, target.vocab_size, target.vocab_size // listed))


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("batch", [1, 8])
@KINDS
def test_greedy_output_is_plain_decodings(target: Target, plain: list[list[int]], kind: str, batch: int) -> None:
    engine = make_engine(target, narrowed(target, kind), 5, max_num_seqs=batch, block_size=4)
    for prompt, answer, request in zip(SEQUENCES, plain, run(engine, SEQUENCES, greedy(40)), strict=True):
        assert_same(target, prompt, answer, request.output_token_ids)


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("own_lm_head", [False, True])
@KINDS
def test_drafts_stay_within_the_vocabulary(
    target: Target, kind: str, own_lm_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = narrowed(target, kind, own_lm_head=own_lm_head)
    assert drafter.vocabulary is not None
    engine = make_engine(target, drafter, 5)
    lanes, found = engine.runner.lanes, []
    store = lanes.store_drafts

    def stored(drafts: torch.Tensor, num_drafts: torch.Tensor, *where: torch.Tensor) -> None:
        assert drafter.vocabulary is not None
        found.extend(i for row, n in zip(drafts.tolist(), num_drafts.tolist(), strict=True) for i in row[:n])
        assert set(found[-int(num_drafts.sum()) :] if num_drafts.any() else ()) <= set(drafter.vocabulary.ids.tolist())
        store(drafts, num_drafts, *where)

    monkeypatch.setattr(lanes, "store_drafts", stored)
    requests = run(engine, SEQUENCES, greedy(20))
    assert len(found) > 100
    texts = {i for request in requests for i in request.token_ids}
    assert set(drafter.vocabulary.recent.tolist()) & texts, "tokens of the texts were taken in"


@KINDS
def test_logits_are_the_whole_heads(target: Target, kind: str) -> None:
    drafter, whole = narrowed(target, kind), tiny_head(target, kind)
    rows = torch.randn(5, target.hidden_size)
    ids = drafter.to_target_ids(torch.arange(len(drafter.logits(rows)[0])))
    torch.testing.assert_close(drafter.logits(rows), whole.logits(rows)[:, ids], atol=2e-3, rtol=2e-3)


@pytest.fixture
def saved(target_folder: Callable[[str], Path], tmp_path: Path) -> tuple[Target, str]:
    """A target of its own (preparing changes it), and a head's folder with a list of 40 tokens."""
    loaded = load_target(str(target_folder("llama")), device="cpu")
    counts = np.zeros(loaded.vocab_size, dtype=np.int64)
    counts[50:90] = 1
    folder = save_drafter(tiny_head(loaded), tmp_path / "head")
    write_draft_vocabulary(folder, counts)
    return loaded, str(folder)


def test_a_heads_list_is_used(saved: tuple[Target, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peagle.drafter.draft_vocabulary.RECENT", 4)
    target, head = saved
    for choice in ("auto", "listed"):
        config = {"model": head, "num_speculative_tokens": 3, "draft_vocabulary": choice}
        vocabulary = load_engine(target, config).drafter.vocabulary  # type: ignore[union-attr]
        assert vocabulary is not None
        assert vocabulary.ids.tolist() == [*range(50, 90), 0, 1, 2, 3]
    whole = load_bound_drafter(target, SpeculativeConfig(head, 3, draft_vocabulary="whole"))
    assert whole.vocabulary is None
    (Path(head) / FILE).unlink()
    assert load_bound_drafter(target, SpeculativeConfig(head, 3)).vocabulary is None
    with pytest.raises(InputError, match=f"draft_vocabulary: got 'listed', but .* has no {FILE}"):
        load_bound_drafter(target, SpeculativeConfig(head, 3, draft_vocabulary="listed"))


def test_a_list_of_another_vocabulary_is_refused(saved: tuple[Target, str]) -> None:
    target, head = saved
    path = Path(head) / FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 7}))
    with pytest.raises(InputError, match=r"vocab_size: got 7 in .*, expected the target's"):
        load_bound_drafter(target, SpeculativeConfig(head, 3))


def test_refused_where_it_cannot_be(
    saved: tuple[Target, str], target_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    target, head = saved
    low = load_target(str(target_folder("llama")), "bfloat16", "cpu")
    assert load_bound_drafter(low, SpeculativeConfig(head, 3)).vocabulary is None
    with pytest.raises(InputError, match="draft_vocabulary: got 'listed' with a bfloat16 target on cpu"):
        load_bound_drafter(low, SpeculativeConfig(head, 3, draft_vocabulary="listed"))
    reduced = save_drafter(tiny_head(target, draft_vocab_size=64), tmp_path / "reduced")
    with pytest.raises(InputError, match="draft_vocabulary: got 'listed' with a head with 64 draft tokens of its own"):
        load_bound_drafter(target, SpeculativeConfig(str(reduced), 3, draft_vocabulary="listed"))
    with pytest.raises(InputError, match="draft_vocabulary: got 'some', expected one of auto, listed, whole"):
        SpeculativeConfig("head", 3, draft_vocabulary="some")  # type: ignore[arg-type]
