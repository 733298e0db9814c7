"""The dimensions of long_sequences.py with speculators 0.9.0's P-EAGLE model: tokens/s and peak memory of a step.

python benchmarks/long_speculators.py -o long-speculators               # 2K, 4K, 8K, and doubled until it fails
python benchmarks/long_speculators.py -o tiny --tiny                    # tiny dimensions, on a CPU in seconds

Needs beside this project's packages, installed with --no-deps: speculators==0.9.0, pydantic, pydantic_core,
annotated-types and typing-inspection. What speculators imports for its data generation alone (datasets, openai,
hs-connectors) is replaced by empty modules where it is absent.

A step is what its own trainer does: the model in float32 under bf16 autocast, its compiled forward with its fused KL
loss, backward, clipping, AdamW. In its favour: its rows are sampled once a length by its own function and kept, so that
nothing compiles again in the measured steps (checked, and printed if it does); embeddings and LM head are frozen, where
its default trains the embeddings; AdamW is the fused one. All positions are anchors (`--max-anchors`: its trainer's
default is 512 a sequence, which trains fewer rows). Random states stand for the target's, as in long_sequences.py.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import sys
import time
import types
from pathlib import Path
from typing import Any

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch
from long_common import EIGHT_B, TINY, Shape, facts, measure, show, until_it_fails, write

NOT_NEEDED = ("datasets", "openai", "hs_connectors")


class Absent(types.ModuleType):
    """Stands for a package of which only names are imported."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load_speculators() -> tuple[Any, Any]:
    """speculators' (core, config) modules of P-EAGLE."""
    while True:
        try:
            return tuple(importlib.import_module(f"speculators.models.peagle.{name}") for name in ("core", "config"))
        except ModuleNotFoundError as error:
            if error.name is None or error.name.split(".")[0] not in NOT_NEEDED:
                raise
            sys.modules[error.name] = Absent(error.name)
            for name in [name for name in sys.modules if name.split(".")[0] == "speculators"]:
                del sys.modules[name]


def make_model(core: Any, config: Any, shape: Shape, device: torch.device) -> Any:
    from transformers import LlamaConfig

    cuda = device.type == "cuda"
    layers = LlamaConfig(
        vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers, num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim, max_position_embeddings=1 << 20,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    layers._attn_implementation = "simple_flex_attention" if cuda else "eager"  # its own default, and its only CPU way
    settings = config.PEagleSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=shape.draft_vocab, mask_token_id=shape.vocab - 1,
        eagle_aux_hidden_state_layer_ids=[2, 16, 29], embed_requires_grad=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        model = core.PEagleDraftModel(settings)
    with torch.no_grad():  # the target's weights, which it marks with NaN until they are loaded
        for module in (model.embed_tokens, model.lm_head, model.verifier_lm_head):
            module.weight.normal_(std=shape.hidden**-0.5)
            module.weight.requires_grad_(False)
        model.verifier_norm.weight.fill_(1.0)
    assert not any(bool(p.isnan().any()) for p in model.parameters())
    return model.train()


def fix_rows(core: Any, sample: Any, shape: Shape, length: int, device: torch.device, anchors: int | None) -> int:
    """Sample rows once with speculators' function and let the model use them in every step; returns their number."""
    anchor, depth = sample(
        seq_length=length,
        loss_mask=torch.ones(1, length, device=device),
        num_depths=shape.depths,
        down_sample_ratio=shape.keep_rate,
        max_anchors=anchors,
    )

    def kept(**_: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return anchor, depth

    core.generate_cod_sample_indices = kept
    return int(anchor.shape[0])


def compiled_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


class Peer:
    """The model with its optimizer; `run` measures one length."""

    def __init__(self, shape: Shape, device: torch.device, anchors: int | None) -> None:
        self.shape, self.device, self.anchors = shape, device, anchors
        self.core, config = load_speculators()
        self.sample = self.core.generate_cod_sample_indices
        self.model = make_model(self.core, config, shape, device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=device.type == "cuda")
        losses = importlib.import_module("speculators.losses")
        self.loss = losses.resolve_loss_config("kl_div", "fused" if device.type == "cuda" else "eager")

    def step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            _, loss, _ = self.model(
                **batch, num_depths=self.shape.depths, down_sample_ratio=self.shape.keep_rate, loss_config=self.loss
            )
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return loss.detach()

    def run(self, length: int, steps: int) -> dict[str, Any]:
        torch._dynamo.reset()  # every length compiles for itself: nothing is slowed down by dynamic shapes
        hidden, device = self.shape.hidden, self.device
        rows = fix_rows(self.core, self.sample, self.shape, length, device, self.anchors)
        batch = {
            "hidden_states": torch.randn(1, length, 3 * hidden, device=device, dtype=torch.bfloat16),
            "verifier_last_hidden_states": torch.randn(1, length, hidden, device=device, dtype=torch.bfloat16),
            "input_ids": torch.randint(0, self.shape.vocab - 1, (1, length), device=device),
            "document_ids": torch.zeros(1, length, dtype=torch.long, device=device),
            "loss_mask": torch.ones(1, length, device=device),
        }
        try:
            began = time.perf_counter()
            for _ in range(2):
                loss = float(self.step(batch))
            warm, before = time.perf_counter() - began, compiled_graphs()
            row = measure(device, length, lambda: self.step(batch), steps)
            again = compiled_graphs() - before
            if again:
                print(f"N = {length}: {again} graphs compiled in the measured steps, their time is in the figures")
            return row | {"rows": rows, "loss": loss, "seconds_to_warm_up": warm, "compiled_while_measured": again}
        finally:
            self.optimizer.zero_grad()


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("long-speculators"))
    parser.add_argument("--first", type=int, default=2048, help="first length; doubled until it fails")
    parser.add_argument("--last", type=int, default=65536)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--max-anchors", type=int)
    parser.add_argument("--seconds", type=float, default=480, help="start no other length after so many")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    # a length is compiled for itself, not for any length at once, as soon as there is a second one
    torch._dynamo.config.automatic_dynamic_shapes = False
    began, device = time.monotonic(), torch.device(args.device)
    shape = TINY if args.tiny else EIGHT_B
    peer = Peer(shape, device, args.max_anchors)
    results: dict[str, Any] = facts(shape, device) | {
        "speculators": importlib.metadata.version("speculators"),
        "max_anchors": args.max_anchors,
        "trained_parameters": sum(p.numel() for p in peer.parameters),
        "lengths": [],
    }
    print(f"{results['trained_parameters']:,} parameters trained; {results['device']}; "
          f"ready after {time.monotonic() - began:.1f} s", flush=True)  # fmt: skip
    n = args.first
    while n <= args.last:
        if time.monotonic() - began > args.seconds:
            print(f"N = {n}: not reached in {args.seconds:g} s")
            break
        row = until_it_fails(device, n, lambda n=n: peer.run(n, args.steps))
        results["lengths"].append(row)
        show(f"speculators {results['speculators']}", row)
        write(args.output / "results.json", results)
        if "failed" in row:
            break
        n *= 2
    print(json.dumps({"seconds": round(time.monotonic() - began, 1)}))
    return results


if __name__ == "__main__":
    main()
