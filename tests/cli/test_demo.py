import json

import pytest

from peagle.bench import demo
from tests.cli.conftest import run_peagle


def test_three_ways(tmp_path, target, heads):
    out = tmp_path / "demo.json"
    result = run_peagle(
        *("demo", "--target", target, "--p-eagle", heads["p-eagle"], "--eagle3", heads["eagle3"], "--device", "cpu"),
        *("--prompt", "hello", "--prompt", "and you?", "--max-tokens", "12", "--k-p-eagle", "4", "--json", out),
        "--transformers",
    )
    assert result.exit_code == 0, result.output
    assert "Outputs identical: EAGLE-3 and P-EAGLE gave the same" in result.stdout
    content = json.loads(out.read_text())
    assert content["identical"] is True
    assert [(mode["name"], mode["k"]) for mode in content["modes"]] == [
        ("plain", 0),
        ("EAGLE-3", demo.BEST_K_EAGLE3),
        ("P-EAGLE", 4),
        ("Transformers", 0),
    ]
    assert [prompt["prompt"] for prompt in content["prompts"]] == ["hello", "and you?"]
    for prompt in content["prompts"]:
        plain, *others = (answer["token_ids"] for answer in prompt["answers"])
        assert all(ids == plain for ids in others)
    assert content["machine"]["threads"] == 1


def test_sweep_and_built_in_prompts(tmp_path, target, heads, monkeypatch):
    monkeypatch.setattr(demo, "SWEPT_KS", range(1, 3))
    out = tmp_path / "demo.json"
    result = run_peagle(
        *("demo", "--target", target, "--p-eagle", heads["p-eagle"], "--device", "cpu", "--sweep"),
        *("--max-tokens", "4", "--json", out, "--prompt", "hi"),
    )
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert [(point["name"], point["k"]) for point in content["sweep"]] == [("P-EAGLE", 1), ("P-EAGLE", 2)]
    assert [mode["name"] for mode in content["modes"]] == ["plain", "P-EAGLE"]
    best = max(content["sweep"], key=lambda point: point["tokens_per_second"])
    assert content["modes"][1]["k"] == best["k"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "TARGET"], "the bundled heads are for"),
        (["--target", "TARGET", "--p-eagle", "EAGLE3"], "eagle3"),
        (["--target", "TARGET", "--p-eagle", "P-EAGLE", "--prompt", " "], "--prompt: got an empty text"),
        (["--target", "TARGET", "--p-eagle", "P-EAGLE", "--prompt", "x" * 600], "expected fewer than the model's 512"),
        (["--target", "TARGET", "--p-eagle", "P-EAGLE", "--json", "/no/such/x.json"], "--json"),
    ],
)
def test_bad_values(target, heads, arguments, message):
    names = {"TARGET": target, "EAGLE3": heads["eagle3"], "P-EAGLE": heads["p-eagle"]}
    result = run_peagle("demo", *(names.get(argument, argument) for argument in arguments))
    assert result.exit_code == 2
    assert message in result.stderr
