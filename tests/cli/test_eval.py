import json

import pytest

from peagle.cli.eval import head_names, parse_ks, prompt_spec
from peagle.drafter import load_drafter, save_drafter
from peagle.errors import InputError
from tests.cli.conftest import run_peagle


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "chat.jsonl"
    rows = [{"turns": ["one", "two"]}, {"turns": ["three", "four"]}, {"turns": ["five", "six"]}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_two_heads_two_depths_two_temperatures(tmp_path, target, heads, prompts):
    out = tmp_path / "out.json"
    result = run_peagle(
        *("eval", target, heads["p-eagle"], heads["eagle3"], "--prompts", f"{prompts}:2", "--k", "1,3"),
        *(
            "--temperature",
            "0",
            "--temperature",
            "0.8",
            "--max-tokens",
            "6",
            "--device",
            "cpu",
            "--check",
            "--json",
            out,
        ),
    )
    assert result.exit_code == 0, result.output
    assert "chat, greedy: 2 prompts, 4 answers" in result.stdout
    assert "chat, temperature 0.8: 2 prompts, 4 answers" in result.stdout
    assert result.stdout.count("all 4 answers equal plain decoding's") == 8
    content = json.loads(out.read_text())
    rows = content["results"]
    assert [(r["head"], r["kind"], r["temperature"], r["k"]) for r in rows] == [
        (kind, kind, t, k) for kind in ("p-eagle", "eagle3") for t in (0.0, 0.8) for k in (1, 3)
    ]
    for row in rows:
        assert row["num_output_tokens"] <= 24
        assert len(row["joint_rates"]) == row["k"]
        assert row["check"]["num_equal"] == 4
    assert content["machine"]["dtype"] == "float32"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chat.jsonl", "out.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--k", "0"], "--k: got '0'"),
        (["--k", "3,x"], "--k: got '3,x'"),
        (["--temperature", "-1"], "temperature"),
        (["--temperature", "0", "--temperature", "-1"], "temperature"),
        (["--max-tokens", "0"], "max_tokens"),
        (["--batch-size", "0"], "--batch-size"),
        (["--dtype", "int8"], "dtype"),
        (["--json", "/no/such/folder/x.json"], "--json: the folder /no/such/folder does not exist"),
    ],
)
def test_bad_values(target, heads, prompts, arguments, message):
    result = run_peagle("eval", target, heads["p-eagle"], "--prompts", prompts, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_a_head_that_does_not_fit_is_named_before_the_others_run(target, heads, prompts, target_folder, tmp_path):
    other = save_drafter(load_drafter(heads["eagle3"]), tmp_path / "other")
    config = json.loads((other / "config.json").read_text()) | {"eagle_aux_hidden_state_layer_ids": [2, 3, 30]}
    (other / "config.json").write_text(json.dumps(config))
    result = run_peagle("eval", target, heads["p-eagle"], other, "--prompts", prompts, "--k", 2)
    assert result.exit_code == 2
    assert f"head {other} does not fit {target}:\n  head: eagle_aux_hidden_state_layer_ids" in result.stderr
    assert "torch" not in result.stderr  # no target was loaded


def test_a_bad_line_is_named(target, heads, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "fine"}\n{"prompt": \n')
    result = run_peagle("eval", target, heads["p-eagle"], "--prompts", bad)
    assert result.exit_code == 2
    assert "bad.jsonl" in result.stderr
    assert "2" in result.stderr


def test_a_head_that_is_none(target, prompts, tmp_path):
    result = run_peagle("eval", target, tmp_path, "--prompts", prompts, "--device", "cpu")
    assert result.exit_code == 2
    assert "config.json" in result.stderr


def test_helpers():
    assert parse_ks("3, 5,3") == [3, 5]
    with pytest.raises(InputError, match="--k"):
        parse_ks("")
    assert prompt_spec("a/b.jsonl:20") == "a/b.jsonl:limit=20"
    assert prompt_spec("a/b.jsonl:limit=20") == "a/b.jsonl:limit=20"
    assert head_names(["x/a", "y/b"]) == ["a", "b"]
    assert head_names(["x/a", "y/a"]) == ["x/a", "y/a"]
