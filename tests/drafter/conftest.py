from pathlib import Path

import pytest

from peagle.drafter import save_drafter
from tests.drafter.heads import make_drafter


@pytest.fixture
def head(tmp_path: Path) -> Path:
    """A saved one-layer P-EAGLE head."""
    return save_drafter(make_drafter(), tmp_path / "head")
