from peagle.bench.acceptance import Acceptance, Check
from peagle.bench.compare import Difference
from peagle.bench.tables import acceptance_table, check_lines, context_table
from peagle.engine.stats import SpecMetrics


def row(head: str, k: int, steps: list[tuple[int, int]], check: Check | None = None, temperature: float = 0.0):
    spec = SpecMetrics()
    for drafted, accepted in steps:
        spec.add(drafted, accepted)
    return Acceptance(head, "p-eagle", "chat", temperature, k, 2, 3, 0, 40, 1.0, spec, check)


def test_heads_stand_side_by_side_within_a_depth():
    results = [row("a", 1, [(1, 1), (1, 0)]), row("a", 2, [(2, 2), (2, 1)]), row("b", 1, [(1, 0)]), row("b", 2, [])]
    lines = acceptance_table(results).splitlines()
    assert lines[0] == "chat, greedy: 2 prompts, 3 answers"
    assert [line.split()[:3] for line in lines[2::2]] == [
        ["1", "a", "1.50"],
        ["1", "b", "1.00"],
        ["2", "a", "2.50"],
        ["2", "b", "1.00"],
    ]
    assert lines[6].split()[-2:] == ["1.000", "0.500"]
    assert lines[7].split() == ["conditional", "1.000", "0.500"]


def test_a_section_for_each_temperature():
    text = acceptance_table([row("a", 1, [(1, 1)]), row("a", 1, [(1, 1)], temperature=0.8)])
    assert "chat, temperature 0.8: 2 prompts" in text


def test_check_lines():
    fine = row("a", 2, [], Check(3, 3, None))
    off = row("b", 2, [], Check(3, 2, Difference(1, 0, 4, 7, 8, 2e-6)))
    assert check_lines([fine, off, row("c", 2, [])]) == [
        "a K=2, chat, greedy: all 3 answers equal plain decoding's",
        "b K=2, chat, greedy: 2 of 3 answers equal plain decoding's; first difference: prompt 2: token 5 differs, "
        "logit gap there 2e-06",
    ]


def test_context_table_has_a_row_for_each_bin_that_any_head_reached():
    a, b = row("a", 2, []), row("b", 2, [])
    for context, accepted in ((1, 2), (511, 0), (512, 1)):
        a.by_context.add(context, accepted)
    b.by_context.add(1024, 2)
    lines = context_table([a, b]).splitlines()
    assert lines[0] == "chat, greedy, K = 2, by context length"
    assert [line.split() for line in lines[2:]] == [
        ["0..511", "2.00", "2", "0"],
        ["512..1023", "2.00", "1", "0"],
        ["1024..1535", "0", "3.00", "1"],
    ]
    assert a.to_dict()["acceptance_lengths_by_context"] == {0: 2.0, 512: 2.0}
    assert a.to_dict()["by_context"]["num_drafts"] == {0: 2, 1: 1}
