"""The inference engine: requests, scheduler, KV cache, draft batch, verification, sampling, LLM."""

from peagle.engine.engine import Engine
from peagle.engine.llm import LLM
from peagle.engine.outputs import CompletionOutput, Logprob, RequestOutput, StepOutput
from peagle.engine.sampling_params import SamplingParams
from peagle.engine.stats import EngineStats, SpecMetrics

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineStats",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "SpecMetrics",
    "StepOutput",
]
