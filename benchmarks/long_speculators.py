"""speculators 0.9.0's P-EAGLE model with the dimensions, rows and supervised tokens of long_head.py.

Needs beside this project's packages, installed with --no-deps: speculators==0.9.0, pydantic, pydantic_core,
annotated-types and typing-inspection. What speculators imports for its data generation alone (datasets, openai,
hs-connectors) is replaced by empty modules where it is absent.

A step is what its own trainer does: the model in float32 under bf16 autocast, its forward as it compiles it, its fused
KL loss, backward (and, timed apart, clipping and AdamW). `DEVIATIONS` lists what is not its default, in its favour.

What it compiles (PyTorch 2.11, counted with TORCH_LOGS): since PyTorch 2.10 it breaks the graph in its first layer,
inside the loop over layers, so `forward` itself runs uncompiled and the functions that it calls are compiled apart: 12
graphs with fixed rows (layer 0's rest and one shared by the other layers hold FlexAttention, one makes the block mask,
one holds the loss), whatever the length, K and number of layers (from two on). By default a second number of rows makes
10 of them again for any number of rows, a third one nothing more. What takes longest: the two FlexAttention backward
kernels, the sort of the block mask (see DEVIATIONS), the two loss kernels in 21 configurations each, one by one.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types
from typing import Any

import torch
from long_common import Shape, sort_outside_triton
from long_head import sampled_rows
from torch import Tensor

NOT_NEEDED = ("datasets", "openai", "hs_connectors")
DEVIATIONS = (
    "the same rows in every step of a length (its own are sampled anew, and their number may change)",
    "every length compiles for itself (by default the second number of rows compiles again, for any number)",
    "every position is an anchor (--max-anchors: its trainer's default is 512 a sequence, which trains fewer rows)",
    "embeddings are frozen (its default trains them)",
    "AdamW is the fused one",
    "each loss kernel has its own list of configurations: PyTorch 2.11 fails on one that two share (pytorch#177600)",
    "the block mask's sort of a few hundred blocks is ATen's: as a Triton kernel it compiles for minutes",
)


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


def let_it_compile() -> None:
    """Two things without which its forward does not compile, or not in time; neither changes what it computes."""
    from speculators.losses import fused

    if fused.loss_backward_kernel.configs is fused.loss_forward_kernel.configs:
        fused.loss_backward_kernel.configs = fused._tile_configs()
    sort_outside_triton()


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


def fix_rows(core: Any, shape: Shape, length: int, device: torch.device) -> tuple[int, Tensor]:
    """Give the model the rows that our side trains, depth after depth as it orders them.

    Returns their number and the loss mask [1, N] that supervises those of them that our side supervises.
    """
    table = sampled_rows(shape, length, shape.keep_rate)
    order = table.depth.argsort(stable=True)
    anchor, depth = table.anchor[order], table.depth[order]
    mask = torch.ones(1, length)
    mask[:, -2:] = 0  # x[p + 2] does not exist there
    assert torch.equal(mask[0, anchor + depth] == 1, table.supervised[order])
    kept = (anchor.to(device), depth.to(device))
    core.generate_cod_sample_indices = lambda **_: kept
    return len(anchor), mask.to(device)


class Peer:
    """The model with its optimizer."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.core, config = load_speculators()
        if device.type == "cuda":
            let_it_compile()
        self.version = importlib.metadata.version("speculators")
        self.model = make_model(self.core, config, shape, device)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-5, fused=device.type == "cuda")
        losses = importlib.import_module("speculators.losses")
        self.loss = losses.resolve_loss_config("kl_div", "fused" if device.type == "cuda" else "eager")

    def batch(self, length: int) -> tuple[int, dict[str, Tensor]]:
        """The number of rows, and what the model is called with: random states and tokens."""
        hidden, device = self.shape.hidden, self.device
        rows, mask = fix_rows(self.core, self.shape, length, device)
        return rows, {
            "hidden_states": torch.randn(1, length, 3 * hidden, device=device, dtype=torch.bfloat16),
            "verifier_last_hidden_states": torch.randn(1, length, hidden, device=device, dtype=torch.bfloat16),
            "input_ids": torch.randint(0, self.shape.vocab - 1, (1, length), device=device),
            "document_ids": torch.zeros(1, length, dtype=torch.long, device=device),
            "loss_mask": mask,
        }

    def gradients(self, batch: dict[str, Tensor]) -> Tensor:
        """Forward and backward; returns the loss."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16):
            _, loss, _ = self.model(
                **batch, num_depths=self.shape.depths, down_sample_ratio=self.shape.keep_rate, loss_config=self.loss
            )
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
