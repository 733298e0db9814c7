import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from peagle.cli.data import data_app
from peagle.data.metadata import target_facts
from peagle.data.shards import Answer, prepare_folder, write_shard
from peagle.errors import InputError


@pytest.fixture
def folder(tmp_path, chat):
    chat.tokenizer.save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "config.json").write_text("{}")
    prepare_folder(tmp_path / "answers", target_facts(str(tmp_path / "tiny"), chat.tokenizer, 300), {})
    ids = chat.first_turn("What is a lighthouse for, and who keeps it?")
    row = Answer([*ids, 70, 2], [False] * len(ids) + [True, True], "s", 0.0, "stop", "p")
    write_shard(tmp_path / "answers" / "answers-00000.parquet", [row])
    return tmp_path / "answers"


def invoke(*arguments):
    return CliRunner().invoke(data_app, [str(argument) for argument in arguments], catch_exceptions=False)


def test_stats(folder, tmp_path):
    result = invoke("stats", folder, "--plot", tmp_path / "p.png")
    assert result.exit_code == 0
    assert "source" in result.output
    assert (tmp_path / "p.png").exists()
    sources = json.loads(invoke("stats", folder, "--json").output)["sources"]
    assert [source["source"] for source in sources] == ["s", "all"]


def test_check_and_merge(folder, tmp_path):
    (tmp_path / "fine.jsonl").write_text('{"prompt": "Name the parts of a flower and what each does."}\n')
    (tmp_path / "same.jsonl").write_text('{"prompt": "what is a LIGHTHOUSE for and who keeps it"}\n')
    assert "none too close" in invoke("check", folder, "--exclude", tmp_path / "fine.jsonl").output
    with pytest.raises(InputError, match="example 0 of source 's'"):
        invoke("check", folder, "--exclude", tmp_path / "same.jsonl")
    assert invoke("merge", folder, "-o", tmp_path / "merged").exit_code == 0
    assert (tmp_path / "merged" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--turns-share", "2", "--prompts", "x"], "--turns-share 2.0: expected 0 to 1"),
        (["--turns", "0", "--prompts", "x"], "--turns 0"),
        (["--max-num-seqs", "0", "--prompts", "x"], "--max-num-seqs 0"),
        (["--max-model-len", "0", "--prompts", "x"], "--max-model-len 0"),
        (["--shard", "3/2", "--prompts", "x"], "--shard"),
        (["--temperature", "hot", "--prompts", "x"], "--temperature 'hot'"),
        (["--chat-template-kwargs", "[]", "--prompts", "x"], "expected a JSON object"),
        ([], "nothing to answer"),
        (["--endpoint", "http://x", "--prompts", "x", "--concurrency", "0"], "--concurrency 0"),
        (["--endpoint", "http://x", "--prompts", "x", "--max-retries", "-1"], "--max-retries -1"),
        (["--endpoint", "http://x", "--prompts", "x", "--device", "cpu"], "--device: only for the engine in this"),
        (["--endpoint", "http://x", "--prompts", "x", "--window", "9"], "--window: only for the engine in this"),
        (["--concurrency", "4", "--prompts", "x"], "--concurrency: only for an --endpoint"),
        (["--retry-refused", "--prompts", "x"], "--retry-refused: only for an --endpoint"),
    ],
)
def test_bad_arguments(tmp_path, arguments, message):
    with pytest.raises(InputError, match=message):
        invoke("generate", "target", "-o", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_help_needs_no_heavy_import():
    heavy = "{'torch', 'transformers', 'rich', 'pyarrow', 'httpx'}"
    code = f"import sys; import peagle.cli.data; print(sorted({heavy} & set(sys.modules)))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
