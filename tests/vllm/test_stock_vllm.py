"""Heads of the published layouts in stock vLLM on the CPU: its plain decoding's tokens, the acceptance that we have.

VLLM_PYTHON names the Python of an environment with vLLM; without it these are skipped. Takes minutes: every decoding is
a vLLM process of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.published import HEADS, as_published, call, tiny, train_head, write_tiny_target

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PYTHON is None, reason="needs stock vLLM: set VLLM_PYTHON to the Python of its environment"),
]
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import vllm_parity  # noqa: E402

sys.path.pop(0)


def compare(folder: Path, target: Path, heads: list[Path], k: int) -> dict[str, Any]:
    """benchmarks/vllm_parity.py on the prompts of the training; its table goes to stdout, its JSON is returned."""
    assert PYTHON is not None
    output = folder / f"parity-{k}-{heads[0].parent.name}.json"
    options = {"--prompts": folder / "prompts.jsonl", "--vllm-python": PYTHON, "--k": k, "--json": output}
    options |= {"--max-tokens": 48, "--max-model-len": 256}
    vllm_parity.main([str(part) for part in (target, *heads, *(x for pair in options.items() for x in pair))])
    return json.loads(output.read_text())


def assert_same_tokens(found: dict[str, Any]) -> None:
    """All answers, but for ties that rounding decides."""
    for difference in found["differences"]:
        assert difference["logit_gap"] is not None, difference
        assert difference["logit_gap"] < 1e-4, difference


def assert_parity(found: dict[str, Any]) -> None:
    """Plain decoding, decoding with each head, and the two engines agree; so do their acceptances."""
    assert_same_tokens(found["plain"])
    rows = list(found["results"].values())
    for row in rows:
        for same in (row["vllm"]["against_plain"], row["ours"]["against_plain"], row["across"]):
            assert_same_tokens(same)
        # the same tokens in as many steps: where a single one is left ours takes a step without drafts, vLLM drafts
        assert 0 <= row["vllm"]["num_drafts"] - row["ours"]["num_drafts"] <= found["plain"]["of"]
        assert row["vllm"]["acceptance_length"] > 1.5
    for engine in ("vllm", "ours"):  # one head in several layouts
        assert len({json.dumps(row[engine]["token_ids"]) for row in rows}) == 1
        assert len({row[engine]["num_accepted_tokens"] for row in rows}) == 1
        assert len({row[engine]["num_drafts"] for row in rows}) == 1


@pytest.mark.parametrize("name", HEADS)
def test_a_trained_head_in_every_layout(name, tmp_path):
    """Native, speculators, and what `peagle convert` makes of one as published: no auxiliary layers in its config."""
    target = write_tiny_target(tmp_path / "target", name)
    native = train_head(tmp_path, target, name, steps=60)
    call("convert", native, tmp_path / "speculators", "--layout", "speculators")
    as_published(native, tmp_path / "published", tiny(name))
    call("convert", tmp_path / "published", tmp_path / "converted", "--layout", "native")
    heads = [native, tmp_path / "speculators", tmp_path / "converted"]
    assert_parity(compare(tmp_path, target, heads, tiny(name).k_train))


def test_an_eagle3_head_in_both_layouts(tmp_path):
    name = "gpt-oss-20b"
    target = write_tiny_target(tmp_path / "target", name)
    native = train_head(tmp_path, target, name, "--kind", "eagle3", "--layers", 1, steps=60)
    call("convert", native, tmp_path / "speculators", "--layout", "speculators")
    assert_parity(compare(tmp_path, target, [native, tmp_path / "speculators"], 4))
