"""Stock vLLM reads a converted head's config as if the one that it was made from did not lie in it.

VLLM_PYTHON names the Python of an environment with vLLM; without it this is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from peagle.drafter import load_drafter
from peagle.drafter.convert import SOURCE, convert_head
from peagle.drafter.facts import read_head_facts
from tests.drafter.test_convert_config import OTHER, PUBLISHED, put
from tests.vllm.test_stock_vllm_answers import CPU

PYTHON = os.environ.get("VLLM_PYTHON")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(PYTHON is None, reason="needs stock vLLM: set VLLM_PYTHON to the Python of its environment"),
]
READ = """
import json, sys
from vllm.transformers_utils.config import get_config
for folder in sys.argv[1:]:
    print("config", json.dumps(get_config(folder, trust_remote_code=False).to_dict(), default=str))
"""


def read_by_vllm(*folders: Path) -> list[dict[str, Any]]:
    """What vLLM makes of the folders' config.json."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | CPU  # its environment, not ours
    command = [str(PYTHON), "-c", READ, *map(str, folders)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("config ") for line in done.stdout.splitlines() if line.startswith("config ")]
    return [json.loads(line) for line in lines]


def test_vllm_reads_past_the_source(tmp_path: Path) -> None:
    heads, bare = [], []
    for number, name in enumerate(PUBLISHED):
        start = put(tmp_path / f"start-{number}", name)
        layout = read_head_facts(start).layout
        assert layout is not None
        heads.append(convert_head(start, tmp_path / f"head-{number}", OTHER[layout]))
        config = json.loads((heads[-1] / "config.json").read_text())
        assert config.pop(SOURCE)
        bare.append(tmp_path / f"bare-{number}")
        bare[-1].mkdir()
        (bare[-1] / "config.json").write_text(json.dumps(config))
    found = read_by_vllm(*heads, *bare)
    assert len(found) == len(heads) + len(bare)
    for head, with_source, without in zip(heads, found, found[len(heads) :], strict=False):
        names = {"_name_or_path", SOURCE}
        assert {k: v for k, v in with_source.items() if k not in names} == {
            k: v for k, v in without.items() if k not in names
        }
        ours = load_drafter(head).config
        for key in ("hidden_size", "num_hidden_layers", "vocab_size", "draft_vocab_size", "rms_norm_eps"):
            assert with_source[key] == getattr(ours, key)
        mask = with_source.get("pard_token", with_source.get("ptd_token_id"))
        assert mask == ours.mask_token_id
