"""The engine's settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peagle.config.checks import check_positive, is_number
from peagle.errors import InputError


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine, under vLLM's names.

    max_model_len None: the model's length, or what the KV cache holds. max_num_batched_tokens None: 8192 on a GPU, 1024
    on a CPU, and never less than max_num_seqs. num_kv_blocks None: from gpu_memory_utilization of the card's memory, or
    cpu_kv_cache_gib of the host's. seed: of requests that bring none. num_scheduler_steps: decoding steps between two
    looks of the host; more is faster for large batches without speculation, and tokens arrive in bursts. max_logprobs:
    the most logprobs or prompt_logprobs that a request may ask for a token, -1 for no limit. enable_prefix_caching: a
    prompt's beginning that was computed before, for any request, is not computed again. On a GPU: async_scheduling
    starts a step that only decodes before the host has read the one before it; enforce_eager runs without CUDA graphs;
    max_cudagraph_capture_size is the most rows (K + 1 a request) of a step that is captured, None for up to 1024, 0 for
    none.
    kv_cache_dtype fp8 keeps keys and values of target and drafter in float8 (e4m3, with scale 1): half the memory.
    dynamic_speculation: choose by load how many of num_speculative_tokens drafts to make (a CPU only); None: where it
    can be done.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_scheduler_steps: int = 1
    async_scheduling: bool = True
    enforce_eager: bool = False
    max_cudagraph_capture_size: int | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_logprobs: int = 20
    seed: int = 0
    dynamic_speculation: bool | None = False

    def __post_init__(self) -> None:
        if self.dynamic_speculation not in (None, True, False):
            raise InputError(f"dynamic_speculation: got {self.dynamic_speculation!r}, expected True, False or None")
        for name in ("max_num_seqs", "block_size", "num_scheduler_steps"):
            check_positive(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks"):
            check_positive(name, getattr(self, name), or_none=True)
        if self.max_cudagraph_capture_size != 0:
            check_positive("max_cudagraph_capture_size", self.max_cudagraph_capture_size, or_none=True)
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise InputError(f"kv_cache_dtype: got {self.kv_cache_dtype!r}, expected 'auto' or 'fp8'")
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            raise InputError(f"max_logprobs: got {self.max_logprobs!r}, expected -1 (no limit) or 0 or more")
        if not is_number(self.gpu_memory_utilization) or not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"gpu_memory_utilization: got {self.gpu_memory_utilization!r}, expected a number above 0 and at most 1"
            )
        if not is_number(self.cpu_kv_cache_gib) or not self.cpu_kv_cache_gib > 0:
            raise InputError(f"cpu_kv_cache_gib: got {self.cpu_kv_cache_gib!r}, expected a number above 0")

    def batched_tokens(self, device_type: str, max_model_len: int) -> int:
        """The budget of rows a step, resolved for a device."""
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
        else:
            tokens = max(8192 if device_type == "cuda" else 1024, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                tokens = max(tokens, max_model_len)
        if not self.enable_chunked_prefill and tokens < max_model_len:
            raise InputError(
                f"max_num_batched_tokens: got {tokens}, expected at least max_model_len ({max_model_len}) without "
                "chunked prefill"
            )
        return tokens
