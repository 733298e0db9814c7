"""How many KV blocks there are: from the user's number, from a budget on the CPU, from free memory on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from peagle.config.engine import EngineConfig
from peagle.drafter.model import Drafter
from peagle.errors import InputError
from peagle.target.model import Target


def cache_dtype(target: Target, config: EngineConfig) -> torch.dtype:
    """What keys and values are kept in, the drafter's too. Raises InputError where the device cannot."""
    if config.kv_cache_dtype == "auto":
        return target.dtype
    if target.device.type == "cuda" and torch.cuda.get_device_capability(target.device) < (8, 9):
        name = torch.cuda.get_device_name(target.device)
        raise InputError(f"kv_cache_dtype: got 'fp8', which {name} does not have, expected 'auto'")
    return torch.float8_e4m3fn


def bytes_per_block(
    target: Target, drafter: Drafter | None, block_size: int, dtype: torch.dtype, late_drafting: bool = False
) -> int:
    """Keys and values of one block over all layers of target and drafter, and with late_drafting the target's auxiliary
    states (see late_rows)."""
    values = target.num_layers * target.num_key_value_heads * target.head_dim
    if drafter is not None:
        c = drafter.config
        values += c.num_hidden_layers * c.num_key_value_heads * c.head_dim
    states = drafter.config.aux_size * target.dtype.itemsize if drafter is not None and late_drafting else 0
    return block_size * (2 * values * dtype.itemsize + states)


def activation_bytes(target: Target, config: EngineConfig, max_num_batched_tokens: int, rows_per_request: int) -> int:
    """A generous guess of what a step needs beside weights and caches: its widest layer and its logits."""
    intermediate = int(getattr(target.config, "intermediate_size", 4 * target.hidden_size))
    layer = max_num_batched_tokens * (12 * target.hidden_size + 4 * intermediate) * target.dtype.itemsize
    logit_rows = min(config.max_num_seqs * rows_per_request, max_num_batched_tokens)
    return layer + logit_rows * target.vocab_size * (target.dtype.itemsize + 3 * 4)


def num_kv_blocks(
    target: Target,
    drafter: Drafter | None,
    config: EngineConfig,
    max_model_len: int,
    max_num_batched_tokens: int,
    num_speculative_tokens: int,
    late_drafting: bool = False,
) -> int:
    """The number of blocks to allocate, at most what max_num_seqs requests of max_model_len tokens could fill.

    Raises InputError for more than a host's memory holds.
    """
    per_block = bytes_per_block(target, drafter, config.block_size, cache_dtype(target, config), late_drafting)
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks
    else:
        useful = config.max_num_seqs * -(-max_model_len // config.block_size)
        if target.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(target.device)
            reserve = activation_bytes(target, config, max_num_batched_tokens, num_speculative_tokens + 1)
            budget = int(total * config.gpu_memory_utilization) - (total - free) - reserve
        else:
            budget = int(config.cpu_kv_cache_gib * 2**30)
        blocks = max(min(useful, budget // per_block), 0)
    if target.device.type == "cpu":
        check_host_memory(config, blocks * per_block)
    return blocks


def check_host_memory(config: EngineConfig, num_bytes: int) -> None:
    """Refuse a cache that the host cannot hold: its allocator would grant it, and the system kill the process later."""
    available = host_memory()
    if available is None or num_bytes <= available:
        return
    name, value = "cpu_kv_cache_gib", f"{config.cpu_kv_cache_gib:g}"
    if config.num_kv_blocks is not None:
        name, value = "num_kv_blocks", str(config.num_kv_blocks)
    raise InputError(
        f"{name}: got {value}, which takes {num_bytes / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB are available; "
        f"lower it, max_num_seqs or max_model_len"
    )


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or what it came of, says that memory has run out: PyTorch has a type for a GPU's only, and a
    recording that breaks off for want of it fails once more when it is ended."""
    while error is not None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, RuntimeError) and ("out of memory" in str(error) or "can't allocate" in str(error)):
            return True
        error = error.__cause__ or error.__context__
    return False


def host_memory() -> int | None:
    """Bytes that a process can still have here, within its control group; None where the system does not say."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # not Linux, no such group, or "max" for no limit
        pass
    return min(found, default=None)


def fit_model_len(
    num_blocks: int, config: EngineConfig, model_len: int, device: torch.device, chosen_by_user: bool
) -> int:
    """The length that the blocks can hold for one request; raises InputError when the user asked for more."""
    capacity = num_blocks * config.block_size
    if capacity >= model_len:
        return model_len
    if config.num_kv_blocks is not None:
        setting = f"num_kv_blocks ({config.num_kv_blocks}, of block_size {config.block_size})"
    elif device.type == "cuda":
        setting = f"gpu_memory_utilization ({config.gpu_memory_utilization})"
    else:
        setting = f"cpu_kv_cache_gib ({config.cpu_kv_cache_gib})"
    if chosen_by_user or capacity < 2:
        raise InputError(
            f"max_model_len: one request of {model_len} tokens does not fit the KV cache, which holds {capacity}; "
            f"raise {setting} or lower max_model_len"
        )
    return capacity
