"""The scripts of benchmarks/ as modules, for the tests that run them with tiny sizes."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def load(name: str) -> ModuleType:
    folder = str(Path(__file__).resolve().parents[1] / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return __import__(name)
    finally:
        sys.path.remove(folder)
