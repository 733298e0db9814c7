"""The published layouts from training to decoding: tiny targets of the same architectures and numbers of layers."""

from __future__ import annotations

import json

import pytest

from peagle.drafter.facts import read_head_facts
from tests.vllm.published import HEADS, as_published, call, tiny, train_head, write_tiny_target


@pytest.mark.parametrize("name", HEADS)
def test_train_convert_and_evaluate(name, tmp_path):
    """A few steps on answers that the target wrote itself, then every form of the head decodes the same."""
    sizes = tiny(name)
    target = write_tiny_target(tmp_path / "target", name)
    head = train_head(tmp_path, target, name, steps=6, max_tokens=16)
    facts = read_head_facts(head)
    assert facts.config is not None
    assert {tensor: fact.shape for tensor, fact in facts.tensors.items()} == sizes.shapes()
    assert (facts.config.k_train, facts.config.aux_hidden_state_layer_ids) == (sizes.k_train, sizes.aux)
    speculators, published, back = (tmp_path / form for form in ("speculators", "published", "back"))
    call("convert", head, speculators, "--layout", "speculators")
    as_published(head, published, sizes)
    call("convert", published, back, "--layout", "native")
    assert {n: t.shape for n, t in read_head_facts(back).tensors.items()} == sizes.shapes()
    forms = (head, speculators, published, back)
    for form in forms:
        content = json.loads(call("inspect", form, "--target", target, "--json"))
        assert content["target"]["fits"]
        assert content["shares"] == []
        assert any("d2t" in known["what"] for known in content["engines"]["vllm"]["known"]) is (form == published)

    forms = (published, speculators)
    printed = call(
        "eval", target, *forms, "--prompts", tmp_path / "prompts.jsonl", "--k", sizes.k_train, "--max-tokens", 16,
        "--device", "cpu", "--check", "--json", tmp_path / "eval.json",
    )  # fmt: skip
    assert printed.count("all 5 answers equal plain decoding's") == len(forms)
    results = json.loads((tmp_path / "eval.json").read_text())["results"]
    assert len({result["acceptance_length"] for result in results}) == 1
    assert results[0]["acceptance_length"] > 1
