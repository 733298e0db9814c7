import json
import subprocess
import sys
from dataclasses import replace

import pytest
from transformers import LlamaConfig
from typer.testing import CliRunner

from peagle.cli.data import data_app
from peagle.data.metadata import target_facts
from peagle.data.shards import Answer, prepare_folder, write_shard
from peagle.drafter.config import DrafterConfig
from peagle.drafter.layouts import config_json
from peagle.drafter.loading import read_config
from peagle.errors import InputError
from tests.data.conftest import make_tokenizer


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


@pytest.fixture
def head(tmp_path):
    """A head of the folder's target, as far as its config goes."""
    config = DrafterConfig("eagle3", 32, 64, 1, 2, 2, 16, 300, (0, 1, 2))
    (tmp_path / "head").mkdir()
    write_config(tmp_path / "head", config, tmp_path / "tiny")
    return tmp_path / "head"


def write_config(folder, config, target):
    (folder / "config.json").write_text(json.dumps(config_json(config, "native", str(target))))


def save_target(folder, tokenizer):
    tokenizer.save_pretrained(folder)
    LlamaConfig(vocab_size=300, hidden_size=32, num_attention_heads=2, num_hidden_layers=1).save_pretrained(folder)


def test_draft_vocabulary(folder, head, tmp_path):
    assert invoke("draft-vocabulary", head, folder).exit_code == 0
    assert (head / "draft_vocabulary.json").exists()


def test_draft_vocabulary_of_another_tokenizer_is_refused(folder, head, tmp_path, chat):
    config = read_config(head)
    save_target(tmp_path / "same", chat.tokenizer)
    save_target(tmp_path / "other", make_tokenizer(("x",)))  # as many tokens, as far as the configs say
    write_config(head, config, tmp_path / "other")
    with pytest.raises(InputError, match=r"made with the tokenizer of .*tiny; this target has another"):
        invoke("draft-vocabulary", head, folder)
    assert not (head / "draft_vocabulary.json").exists()
    write_config(head, config, tmp_path / "gone")
    with pytest.raises(InputError, match="HEAD: its target cannot be read, give another place with --target"):
        invoke("draft-vocabulary", head, folder)
    write_config(head, config, "")
    with pytest.raises(InputError, match=r"HEAD: .* does not name its target, expected --target"):
        invoke("draft-vocabulary", head, folder)
    assert invoke("draft-vocabulary", head, folder, "--target", tmp_path / "same").exit_code == 0
    write_config(head, replace(config, vocab_size=301, draft_vocab_size=301), tmp_path / "tiny")
    with pytest.raises(InputError, match="a vocabulary of 300 tokens, expected the head's 301"):
        invoke("draft-vocabulary", head, folder)


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
        (["--loop-limit", "-1", "--prompts", "x"], "--loop-limit -1: expected 0"),
        (["--top-p", "2", "--prompts", "x"], "--top-p: got 2.0"),
        (["--self-top-p", "0", "--prompts", "x"], "--self-top-p: got 0.0"),
        (["--self-max-tokens", "0", "--prompts", "x"], "--self-max-tokens: got 0"),
        (["--self-prompts", "3", "--self-prompts", "3:openings=def"], "2 groups are called 'self'; give each a name="),
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
