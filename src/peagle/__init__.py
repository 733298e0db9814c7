"""P-EAGLE and EAGLE-3 heads: train, serve, measure. `from peagle import LLM, SamplingParams`, as from vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle.engine.llm import LLM as LLM
    from peagle.engine.sampling_params import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__: str


def __getattr__(name: str) -> Any:
    # fetched when asked for: `peagle --help` and the data code do without PyTorch
    if name == "__version__":
        return _version()
    if name not in __all__:
        raise AttributeError(f"module 'peagle' has no attribute {name!r}")
    from peagle import engine

    return getattr(engine, name)


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("peagle")
    except metadata.PackageNotFoundError:  # run from its source
        return "0"
