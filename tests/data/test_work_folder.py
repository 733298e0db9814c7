"""What a killed process was writing is taken away by the next one; what a living one writes is not."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from peagle.data.shards import prepare_folder
from peagle.work_folder import remove_stale, temporary_name, work_folder

TARGET = {"name": "tiny", "vocab_size": 300, "tokenizer": "t", "chat_template": "c"}
WRITER = """
import sys, time
from pathlib import Path
from peagle.data.shards import replacing
from peagle.work_folder import work_folder

folder = Path(sys.argv[1])
with work_folder(folder / "head", "no") as work, replacing(folder / "answers-00000.parquet") as file:
    (work / "half").write_text("x")
    file.write_text("half")
    print("writing", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path):
    """A process that is writing a folder and a file in `tmp_path`."""
    code = [sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)]
    with subprocess.Popen(code, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"writing\n"
        yield process
        process.kill()


def names(folder):
    return {path.name.split(".")[1] for path in folder.iterdir() if path.name.endswith(".tmp") or path.is_dir()}


def test_left_by_a_living_process(writer, tmp_path):
    remove_stale(tmp_path)
    assert names(tmp_path) == {"head", "answers-00000"}
    with work_folder(tmp_path / "head", "no"):
        assert len(list(tmp_path.glob(".head.*"))) == 2
    assert names(tmp_path) == {"head", "answers-00000"}


def test_left_by_a_killed_process(writer, tmp_path):
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    other = temporary_name(tmp_path / "answers-00000.parquet")
    own = tmp_path / ".head.model"
    elsewhere = tmp_path / f".answers-00000.parquet.00000000-{writer.pid}.tmp"
    for kept in (other, own, elsewhere):
        kept.write_text("x")
    with work_folder(tmp_path / "head", "no"):
        assert len([path for path in tmp_path.glob(".head.*") if path.is_dir()]) == 1
    assert len(list(tmp_path.glob(".answers*.tmp"))) == 3, "a folder's writer looks at its own name alone"
    prepare_folder(tmp_path, TARGET, {})
    left = {path for path in tmp_path.iterdir() if path.name not in ("dataset.json", ".lock")}
    assert left == {other, own, elsewhere}
    assert str(os.getpid()) in other.name
