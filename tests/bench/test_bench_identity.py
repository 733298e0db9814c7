"""What a results file is continued with: the same heads, servers, versions and machine, or nothing."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from peagle.bench import identity
from peagle.bench.identity import head_fingerprint, target_weights, versions_of
from tests.bench.fake_server import fake_server
from tests.cli.conftest import run_peagle, target  # noqa: F401  (a fixture)


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(3)))
    return path


def measure(prompts: Path, *arguments: object) -> object:
    common = ("--workload", f"w={prompts}", "--concurrency", "1", "--warm-up", "0", "--no-report")
    return run_peagle("bench", *common, "--output", prompts.parent / "out", *arguments)


def test_another_server_is_not_the_same_arm(prompts):
    with fake_server() as first, fake_server() as second:
        assert measure(prompts, "--endpoint", f"{first.url},name=a,method=none").exit_code == 0
        asked = len(first.bodies)
        for url, more, words in [
            (second.url, "", f"endpoints.no speculation in a: {{'url': '{first.url}'"),
            (first.url, ",model=other", "'model': 'other'"),
        ]:
            result = measure(prompts, "--endpoint", f"{url},name=a,method=none{more}")
            assert result.exit_code == 2
            assert words in result.stderr
        first.version = "1.2.4"
        result = measure(prompts, "--endpoint", f"{first.url},name=a,method=none")
        assert result.exit_code == 2
        assert "'version': '1.2.3'} -> " in result.stderr
        first.version = "1.2.3"
        # more endpoints may join
        both = ("--endpoint", f"{first.url},name=a,method=none", "--endpoint", f"{second.url},name=b,method=none")
        assert measure(prompts, *both).exit_code == 0
        assert (len(first.bodies), len(second.bodies)) == (asked, 3)
        assert measure(prompts, "--endpoint", f"{first.url},name=b,method=none").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--warm-up", "1"], "warm_up: 0 -> 1"),
        (["--stall-timeout", "9"], "stall_timeout: 120.0 -> 9.0"),
        (["--request-timeout", "9"], "request_timeout: 1800.0 -> 9.0"),
        (["--device", "meta"], "device: 'cpu' -> 'meta'"),
    ],
)
def test_how_it_is_measured_stays(prompts, arguments, words):
    with fake_server() as server:
        endpoint = ("--endpoint", f"{server.url},name=a,method=none")
        assert measure(prompts, *endpoint, "--device", "cpu").exit_code == 0
        result = measure(prompts, *endpoint, "--device", "cpu", *arguments)
        assert result.exit_code == 2
        assert words in result.stderr
        # a server may take longer to start than before
        assert measure(prompts, *endpoint, "--device", "cpu", "--start-timeout", "9").exit_code == 0


def test_versions_threads_and_machine_stay(prompts, target, monkeypatch):  # noqa: F811
    command = (target, "--device", "cpu", "--max-tokens", "2", "--max-num-seqs", "2", "--max-model-len", "200")
    command += ("--engine-args", '{"num_kv_blocks": 60}')
    assert measure(prompts, *command).exit_code == 0
    for module, name, value, words in [
        (torch, "get_num_threads", lambda: 7, "threads.peagle: 1 -> 7"),
        (identity, "versions_of", lambda used: versions_of(used) | {"torch": "9"}, "versions.torch: "),
        (identity, "machine_of", lambda device: {"cpu": "other"}, "machine: "),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            result = measure(prompts, *command)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
    (run,) = [line for line in _lines(prompts.parent / "out") if line["type"] == "run"]
    assert run["versions"].keys() == {"peagle", "torch", "transformers"}
    assert run["machine"]["torch"] == run["versions"]["torch"]
    assert "vllm" in versions_of({"vllm"})


def test_a_target_is_known_by_its_weights(prompts, target, tmp_path):  # noqa: F811
    copy = tmp_path / "copy"
    shutil.copytree(target, copy)
    command = (copy, "--device", "cpu", "--max-tokens", "2", "--max-num-seqs", "2", "--max-model-len", "200")
    command += ("--engine-args", '{"num_kv_blocks": 60}')
    assert measure(prompts, *command).exit_code == 0
    results = prompts.parent / "out" / "results.jsonl"
    now = results.read_text()
    for file in copy.iterdir():
        os.utime(file, (1, 1))
    assert measure(prompts, *command).exit_code == 0
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # the same size and header
    weights.write_bytes(content)
    result = measure(prompts, *command)
    assert result.exit_code == 2
    assert f"target_weights.{copy}: " in result.stderr
    # a file of an earlier version does not say, and goes on
    lines = [json.loads(line) for line in now.splitlines()]
    for line in lines:
        line.pop("target_weights", None)
        line.get("settings", {}).pop("target_weights", None)
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measure(prompts, *command, "--repeats", "2").exit_code == 0
    assert [line["target_weights"].keys() for line in _lines(prompts.parent / "out")[-2:-1]] == [{str(copy)}]
    assert measure(prompts, *command, "--report-only").exit_code == 0


def test_a_target_of_the_hub_is_known_by_the_commit_of_its_copy(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "abc123"))
    assert target_weights("owner/name") == {"owner/name": "abc123"}

    def missing(name: str, **options: object) -> str:
        raise OSError("not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    assert target_weights("owner/name") == {}
    assert target_weights("") == {}


def _lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_head_is_known_by_all_its_weights(tmp_path):
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    seen = [head_fingerprint(str(folder))]
    weights.write_bytes(bytes(2 << 20) + b"\x01" + bytes((1 << 20) - 1))  # the same size, another end
    seen.append(head_fingerprint(str(folder)))
    (folder / "draft_vocabulary.json").write_text("[1]")
    seen.append(head_fingerprint(str(folder)))
    (folder / "config.json").write_text('{"a": 1}')
    seen.append(head_fingerprint(str(folder)))
    assert len(set(seen)) == 4
    (folder / "README.md").write_text("words")
    assert head_fingerprint(str(folder)) == seen[-1]


def test_a_head_of_the_hub_is_known_by_its_commit(tmp_path, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(tmp_path / "abc123"))
    assert head_fingerprint("owner/name") == "owner/name@abc123"

    def missing(name: str, **options: object) -> str:
        raise OSError("not cached")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", missing)
    assert head_fingerprint("owner/name") == "owner/name"
