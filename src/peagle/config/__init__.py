"""What users write: the JSON of vLLM's --speculative-config, the engine's settings, the training settings."""

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig
from peagle.config.training import TrainConfig

__all__ = ["EngineConfig", "SpeculativeConfig", "TrainConfig"]
