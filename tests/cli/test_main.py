import subprocess
import sys

import pytest

from tests.cli.conftest import run_peagle


def test_verbs():
    result = run_peagle("--help")
    assert result.exit_code == 0
    for verb in ("data", "train", "eval", "demo"):
        assert verb in result.output


def test_version():
    result = run_peagle("--version")
    assert result.exit_code == 0
    assert result.output.startswith("peagle ")


def test_a_users_mistake_is_one_line(tmp_path, heads):
    result = run_peagle("eval", tmp_path / "nothing", heads["p-eagle"], "--prompts", tmp_path / "no.jsonl")
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("peagle: error: ")
    assert "no.jsonl" in result.stderr
    assert result.stdout == ""


def test_debug_shows_the_traceback(tmp_path, heads, monkeypatch):
    monkeypatch.setenv("PEAGLE_DEBUG", "1")
    result = run_peagle("eval", tmp_path / "nothing", heads["p-eagle"], "--prompts", tmp_path / "no.jsonl")
    assert type(result.exception).__name__ == "InputError"


def test_an_unknown_option_is_a_mistake_too():
    assert run_peagle("demo", "--no-such").exit_code == 2


@pytest.mark.parametrize("arguments", [["--help"], ["eval", "--help"], ["demo", "--help"], ["train", "--help"]])
def test_help_loads_no_framework(arguments):
    """What makes `--help` slow is importing PyTorch or Transformers."""
    code = (
        "import sys, runpy\n"
        f"sys.argv = ['peagle', *{arguments!r}]\n"
        "try:\n    runpy.run_module('peagle', run_name='__main__')\n"
        "except SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
