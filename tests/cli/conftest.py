"""A tiny target and two tiny heads in folders, as the command line takes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from peagle.cli.main import app
from peagle.drafter import Drafter, DrafterConfig, save_drafter
from tests.conftest import COMMON, MASK, VOCAB


@pytest.fixture(scope="session")
def target(target_folder: Callable[[str], Path]) -> str:
    return str(target_folder("llama"))


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folder by kind; random weights."""
    folder = tmp_path_factory.mktemp("heads")
    torch.manual_seed(3)
    made = {}
    for kind in ("p-eagle", "eagle3"):
        config = DrafterConfig(
            kind=kind,  # type: ignore[arg-type]
            hidden_size=COMMON["hidden_size"],
            intermediate_size=COMMON["intermediate_size"],
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=VOCAB,
            aux_hidden_state_layer_ids=(2, 3, 4),
            max_position_embeddings=512,
            mask_token_id=MASK if kind == "p-eagle" else None,
            k_train=4,
        )
        made[kind] = str(save_drafter(Drafter(config), folder / kind))
    return made


def run_peagle(*arguments: object) -> Any:
    """`peagle ARGUMENTS`, in this process."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])
