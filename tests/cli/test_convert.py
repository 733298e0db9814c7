from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.cli.conftest import run_peagle


def test_to_the_other_layout(heads, tmp_path):
    out = tmp_path / "out"
    result = run_peagle("convert", heads["p-eagle"], out, "--layout", "speculators")
    assert result.exit_code == 0, result.output
    assert "speculators layout" in result.stdout
    before, after = load_file(Path(heads["p-eagle"]) / "model.safetensors"), load_file(out / "model.safetensors")
    assert len(before) == len(after)
    for name, tensor in before.items():
        assert torch.equal(after[name.replace("midlayer.", "layers.0.")], tensor)
    again = run_peagle("convert", heads["p-eagle"], out, "--layout", "native")
    assert again.exit_code == 2
    assert "--force" in again.stderr
    assert run_peagle("convert", heads["p-eagle"], out, "--layout", "native", "--force").exit_code == 0


def test_bad_values(heads, tmp_path):
    (tmp_path / "empty").mkdir()
    for arguments, message in (
        ((heads["eagle3"], tmp_path / "x", "--layout", "gguf"), "--layout: got 'gguf'"),
        ((tmp_path / "empty", tmp_path / "x", "--layout", "native"), "config.json"),
        ((heads["eagle3"], tmp_path / "x"), "--layout"),
    ):
        result = run_peagle("convert", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "empty"]
