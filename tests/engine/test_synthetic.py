"""Synthetic acceptance: the rates asked for, whatever is drafted, in every form of step; and never unnoticed."""

from __future__ import annotations

import logging

import pytest
import torch

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.drafter import save_drafter
from peagle.engine import LLM, Engine, SamplingParams
from peagle.engine.verification import accepts_anything, conditional_rates
from peagle.errors import InputError
from peagle.target import Target
from tests.engine.helpers import SEQUENCES, greedy, run, tiny_head

BASE = {"model": "h", "num_speculative_tokens": 3}


def test_rates_from_a_length() -> None:
    settings = BASE | {"rejection_sample_method": "synthetic"}
    rates = SpeculativeConfig.parse(settings | {"synthetic_acceptance_length": 2.75}).synthetic_rates
    assert rates == (1.0, 0.75, 0.0)
    rates = SpeculativeConfig.parse(settings | {"synthetic_acceptance_rates": [0.9, 0.5, 0.5]}).synthetic_rates
    assert rates == (0.9, 0.5, 0.5)
    assert SpeculativeConfig.parse(BASE).synthetic_rates is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rejection_sample_method": "block"}, "rejection_sample_method: got 'block'"),
        ({"rejection_sample_method": "synthetic"}, "one of the two"),
        ({"synthetic_acceptance_length": 2}, "expected only with"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4.5}, "expected 1 to 4"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": "2"}, "got '2', expected a number"),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": 1},
            "got 1, expected a list",
        ),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": ["1"]}, "expected a list of numbers"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.5]}, "expected 3 numbers"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.5, 0.6, 0.1]}, "none above"),
        ({"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [1.5, 0.6, 0.1]}, "from 1 to 0"),
    ],
)
def test_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        SpeculativeConfig.parse(BASE | settings)


def test_rates_are_kept() -> None:
    """Joint acceptance of many positions and seeds is the rates given."""
    rates = (0.9, 0.5, 0.4, 0.0)
    seeds = torch.arange(200)[:, None].expand(-1, 100).flatten()
    positions = torch.arange(100)[None].expand(200, -1).flatten()
    accepted = accepts_anything(conditional_rates(rates, torch.device("cpu")), seeds, positions)
    joint = accepted.long().cumprod(dim=1).double().mean(dim=0)
    torch.testing.assert_close(joint, torch.tensor(rates, dtype=torch.float64), atol=0.02, rtol=0)


@pytest.mark.parametrize("kind", ["p-eagle", "eagle3"])
def test_engine(target: Target, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The same acceptance in ragged and in fixed steps, one request or many; the flag is everywhere."""
    drafter = tiny_head(target, kind)
    counts = []
    for rows in (0, 1024):
        monkeypatch.setattr("peagle.engine.engine.captured_rows", lambda *_, rows=rows: rows)
        with caplog.at_level(logging.WARNING):
            engine = Engine(target, drafter, 3, EngineConfig(max_num_seqs=8, max_model_len=128), (1.0, 0.6, 0.0))
        assert "SYNTHETIC" in caplog.text
        requests = run(engine, SEQUENCES, [greedy(60, seed=i) for i in range(len(SEQUENCES))])
        counts.append([(r.output_token_ids, r.metrics) for r in requests])
        assert engine.stats.synthetic
        assert engine.stats.spec.synthetic
        assert all(r.metrics.synthetic for r in requests)
        first, second, third = engine.stats.spec.joint_rates
        assert (first, third) == (1.0, 0.0)
        assert 0.4 < second < 0.8
        engine.stats.reset()
        assert engine.stats.spec.synthetic
    assert counts[0] == counts[1]


def test_request_outputs_say_it(target: Target, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("head")
    save_drafter(tiny_head(target), folder)
    settings = {"model": str(folder), "num_speculative_tokens": 3}
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 4}
    params = SamplingParams(max_tokens=13, temperature=0, ignore_eos=True)
    for extra, expected in ((synthetic, True), ({}, False)):
        llm = LLM(target, settings | extra, max_model_len=64)
        (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, params, use_tqdm=False)
        assert output.metrics.synthetic is expected
        assert (output.metrics.acceptance_length == 4) is expected
