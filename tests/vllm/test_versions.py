import pytest

from peagle.vllm.versions import PROBLEMS, certain_failures, drafter_scatters, known_problems, parse_version


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.16.0", (0, 16)),
        ("0.25.1", (0, 25)),
        ("0.32.0+cpu", (0, 32)),
        ("v0.23.1rc1.dev1271+gb6ff8a2f5", (0, 23)),
        ("1.0", (1, 0)),
        ("0.1.dev13030+g05b6a9c37", None),
        ("0.1.7", (0, 1)),
        ("dev", None),
    ],
)
def test_versions(text, version):
    assert parse_version(text) == version


def test_dynamic_k_up_to_0_33_and_only_when_asked_for():
    def mentions(version, traits):
        return any("wrong requests" in problem.what for problem in known_problems(version, traits))

    assert mentions((0, 33), ["dynamic-k"])
    assert not mentions((0, 34), ["dynamic-k"])
    assert not mentions((0, 33), ["p-eagle"])
    assert mentions(None, ["dynamic-k"])  # a build that names no release


def test_a_problem_that_came_with_a_version():
    assert known_problems((0, 29), ["whole-d2t"]) == known_problems((0, 29), [])
    (problem,) = (p for p in known_problems((0, 32), ["whole-d2t"]) if p.trait == "whole-d2t")
    assert problem.versions == "0.30 and later"
    assert "peagle convert" in problem.instead


def test_what_is_certain_to_fail_at_start_and_of_which_versions_nothing_is_certain():
    traits = ["scattered", "scattered-still", "speculators-p-eagle", "whole-d2t", "dynamic-k", "cpu"]
    assert [p.trait for p in certain_failures((0, 16), traits)] == [
        "scattered",
        "scattered-still",
        "speculators-p-eagle",
    ]
    assert [p.trait for p in certain_failures((0, 32), traits)] == ["scattered-still", "whole-d2t"]
    assert certain_failures((0, 34), traits) == certain_failures(None, traits) == []


def test_a_newer_version_has_none_of_the_dated_problems():
    assert known_problems((0, 34), [p.trait for p in PROBLEMS if p.last is not None]) == []
    assert [p.trait for p in known_problems((9, 0), ["scattered-still"])] == ["scattered-still"]


@pytest.mark.parametrize(
    ("full", "window", "drafter", "before_fix", "after_fix"),
    [
        (12, 12, 4, True, False),  # gpt-oss-20b with its published head
        (12, 12, 1, False, False),  # ... with an EAGLE-3 head
        (18, 18, 4, False, False),  # gpt-oss-120b
        (12, 12, 6, True, True),
        (4, 22, 4, False, False),  # Gemma 3: few full-attention layers
        (48, 0, 4, False, False),  # no sliding windows at all
    ],
)
def test_which_heads_vllm_scatters_over_kv_cache_groups(full, window, drafter, before_fix, after_fix):
    assert drafter_scatters(full, window, drafter, threshold=1.25) is before_fix
    assert drafter_scatters(full, window, drafter, threshold=1.5) is after_fix
