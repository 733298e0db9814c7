"""vLLM's half of the shapes is asked for what ours measures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.load_benchmark import load

theirs = load("vllm_shapes")


def test_plain_has_no_head(tmp_path: Path) -> None:
    assert theirs.write_models(tmp_path, "llama-8b", "plain") is None
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize("shape", sorted(theirs.SHAPES))
def test_heads_are_of_the_shape_and_kind(tmp_path: Path, shape: str) -> None:
    ours = load("shapes")
    asked = theirs.write_models(tmp_path, shape, "p-eagle:4:7:3.94")
    head = json.loads((tmp_path / "head" / "config.json").read_text())
    assert asked["num_speculative_tokens"] == 7
    assert asked["synthetic_acceptance_length"] == 3.94
    assert asked["parallel_drafting"]
    assert head["num_hidden_layers"] == 4
    assert head["draft_vocab_size"] == head["vocab_size"] > head["ptd_token_id"]
    if shape == "gpt-oss-20b":
        assert {k: head[k] for k in ours.GPT_OSS_HEAD} == ours.GPT_OSS_HEAD
    eagle3 = theirs.head_config(shape, "eagle3", 1)
    assert eagle3["draft_vocab_size"] == ours.EAGLE3_DRAFT_VOCAB
    assert "parallel_drafting" not in eagle3
