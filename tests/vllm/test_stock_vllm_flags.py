"""`peagle serve --engine vllm` with a flag that vLLM does not know: real vLLM says so, in its own words.

VLLM_PYTHON names the Python of an environment with vLLM; without it this is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.test_stock_vllm_answers import CPU
from tests.vllm.test_stock_vllm_states import write_target

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PYTHON is None, reason="needs stock vLLM: set VLLM_PYTHON to the Python of its environment"),
]


def test_an_unknown_flag_is_refused_by_vllm(tmp_path: Path) -> None:
    target = write_target(tmp_path / "target")
    script = tmp_path / "bin" / "vllm"  # on PATH, where `peagle serve` looks for vLLM's environment
    script.parent.mkdir()
    script.write_text(f"#!{PYTHON}\n")
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "peagle", "serve", str(target), "--engine", "vllm", "--no-such-flag", "1"],
        capture_output=True, text=True, timeout=500, env={**os.environ, **CPU, "PATH": path},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert f"{target} --no-such-flag 1" in done.stdout  # the command that it became
    assert "unrecognized arguments: --no-such-flag" in done.stderr
    assert "peagle: error" not in done.stderr
