"""The target model: loading it, its auxiliary states, its paged attention."""

from peagle.target.loading import load_target
from peagle.target.model import Target, TargetStates

__all__ = ["Target", "TargetStates", "load_target"]
