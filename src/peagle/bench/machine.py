"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers


def cpu_name() -> str:
    """The processor's own name where the system tells it, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Logical processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_facts(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Processor, accelerator, threads, dtype and versions."""
    try:
        version = metadata.version("peagle")
    except metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peagle": version,
    }


def machine_line(facts: dict[str, Any]) -> str:
    """The facts that matter to a reader of timings, in one line."""
    cores = f"{facts['cores']} core{'s' if facts['cores'] != 1 else ''}"
    where = f"{facts['cpu']}, {cores}" if facts["gpu"] is None else f"{facts['gpu']} ({facts['cpu']}, {cores})"
    threads = f"{facts['threads']} thread{'s' if facts['threads'] != 1 else ''}"
    return f"{where} · {facts['dtype']} · {threads} · torch {facts['torch']}"
