import numpy as np
import pytest

from peagle.data.dataset import open_dataset
from peagle.data.lengths import format_table, length_table, plot_lengths, summarise, table_as_json
from peagle.data.metadata import target_facts
from peagle.data.shards import Answer, prepare_folder, write_shard


def test_summary():
    summary = summarise(np.arange(1, 102))
    assert (summary.tokens, summary.min, summary.median, summary.mean) == (5151, 1, 51, 51)
    assert (summary.p90, summary.p99, summary.max) == (91, 100, 101)


def test_table_by_source(tmp_path, tokenizer):
    prepare_folder(tmp_path, target_facts("tiny", tokenizer, 300), {})
    rows = [
        Answer([1] * 10, [False] * 4 + [True] * 6, "b", 0.0, "stop", "0"),
        Answer([1] * 20, [False] * 4 + [True] * 16, "a", 0.0, "length", "1"),
        Answer([1] * 30, [False] * 10 + [True] * 20, "a", 0.0, "stop", "2"),
    ]
    write_shard(tmp_path / "answers-00000.parquet", rows)
    table = length_table(open_dataset(tmp_path))
    assert [(row.source, row.examples, row.cut_share) for row in table] == [
        ("a", 2, 0.5),
        ("b", 1, 0),
        ("all", 3, 1 / 3),
    ]
    assert (table[-1].prompt.tokens, table[-1].answer.tokens, table[-1].total.tokens) == (18, 42, 60)
    assert table[0].answer.median == 18
    text = format_table(table)
    assert len(text.splitlines()) == 10
    assert len({len(line) for line in text.splitlines()}) == 1, "columns line up"
    assert table_as_json(table)[2]["answer"]["tokens"] == 42


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    plot_lengths(np.random.default_rng(0).lognormal(6, 1, 500), tmp_path / "lengths.png", "tiny")
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    assert [path.name for path in tmp_path.iterdir()] == ["lengths.png"]
