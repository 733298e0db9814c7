"""Targets for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from peagle.target import Target, load_target
from tests.engine.helpers import ASCII, SEQUENCES, greedy, make_engine, run


@pytest.fixture(scope="session")
def target(target_folder: Callable[[str], Path]) -> Target:
    """The tiny Llama, made to write only printable ASCII (token ids 0..93), one character a token."""
    loaded = load_target(str(target_folder("llama")), device="cpu")
    with torch.no_grad():
        loaded.lm_head_weight[ASCII:] = 0
    return loaded


@pytest.fixture(scope="session")
def plain(target: Target) -> list[list[int]]:
    """SEQUENCES' greedy continuations (40 tokens) by plain decoding, each alone in an engine."""
    answers = []
    for prompt in SEQUENCES:
        (request,) = run(make_engine(target), [prompt], greedy(40))
        answers.append(request.output_token_ids)
    return answers
