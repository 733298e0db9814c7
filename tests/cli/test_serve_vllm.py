"""`peagle serve --engine`: which engine gets which flags."""

from __future__ import annotations

import pytest

from peagle.cli.serve_vllm import take_engine
from peagle.errors import InputError
from tests.cli.conftest import run_peagle


def test_engine_is_taken_out_wherever_it_stands():
    assert take_engine(["T", "--engine", "vllm", "--port", "1"]) == ("vllm", ["T", "--port", "1"])
    assert take_engine(["--engine=peagle", "T"]) == ("peagle", ["T"])
    assert take_engine(["T"]) == ("peagle", ["T"])
    with pytest.raises(InputError, match="--engine: got 'sglang', expected peagle or vllm"):
        take_engine(["T", "--engine", "sglang"])


def test_vllm_gets_its_own_flags(target_folder):
    flags = ["--tensor-parallel-size", "2", "--port", "9", "--engine", "vllm", "--dry-run"]
    result = run_peagle("serve", target_folder("llama"), *flags)
    assert result.exit_code == 0, result.output
    assert "--tensor-parallel-size 2 --port 9" in result.output
    assert "--engine" not in result.output


@pytest.mark.parametrize(
    "flag",
    [
        "--speculative-config",
        "--speculative_config",
        "--speculative-config=",
        "--speculative_config=",
        "-sc",
        "--speculative-conf",
    ],
)
def test_the_speculative_config_in_each_of_vllms_spellings(target_folder, heads, flag):
    text = f'{{"model": "{heads["eagle3"]}", "num_speculative_tokens": 3}}'
    given = [flag + text] if flag.endswith("=") else [flag, text]
    command = ("serve", target_folder("llama"), "--engine", "vllm", "--dry-run", "--max_model_len=64")
    result = run_peagle(*command, *given)
    assert result.exit_code == 0, result.output
    assert "--speculative-config '{" in result.stdout
    assert "--max_model_len=64" in result.stdout  # vLLM's own, as it was
    for again in ("--speculative_config", "-sc", "--speculative-config"):
        result = run_peagle(*command, *given, again, text)
        assert (result.exit_code, result.stderr) == (
            2,
            "peagle: error: --speculative-config: given twice, expected it once\n",
        )


def test_help_with_a_word_is_vllms(monkeypatch):
    shown = []
    monkeypatch.setattr("peagle.vllm.serve.show_help", shown.append)
    for command in (["serve", "--engine", "vllm", "--help=all"], ["serve", "T", "--engine=vllm", "--help=port"]):
        run_peagle(*command)
    assert shown == ["--help=all", "--help=port"]
    ours = run_peagle("serve", "T", "--engine", "vllm", "--help")
    assert (ours.exit_code, len(shown)) == (0, 2)
    assert "--help=all" in ours.stdout


def test_flags_of_vllm_in_front_of_the_target_are_told(target_folder):
    result = run_peagle("serve", "--engine", "vllm", "--port", "9", target_folder("llama"), "--dry-run")
    assert result.exit_code == 2
    assert "TARGET: got '--port', expected the model before any of vLLM's flags" in result.output


def test_unknown_engine_is_one_line():
    result = run_peagle("serve", "T", "--engine", "x")
    assert result.exit_code == 2
    assert "expected peagle or vllm" in result.output
