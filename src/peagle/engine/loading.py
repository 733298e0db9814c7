"""An engine from names: target, head and settings, checked against each other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from peagle.config import EngineConfig, SpeculativeConfig
from peagle.drafter.checkpoint import check_fits, load_drafter
from peagle.drafter.config import with_aux_layers
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.kernels.packed_linear import pack_linears
from peagle.kernels.rms_norm import fuse_rms_norms
from peagle.target.fused import fuse_decoder_layers
from peagle.target.loading import load_target
from peagle.target.model import Target

logger = logging.getLogger(__name__)


def prepare_for_inference(target: Target) -> None:
    """Replace modules of the target by faster ones that compute the same; calling it again changes nothing.

    On a CPU in float32 the linears get packed weights and drop their own: such a target cannot be saved or trained.
    """
    fuse_rms_norms(target.model)
    if target.device.type == "cuda":
        fuse_decoder_layers(target)
    if target.device.type == "cpu" and target.dtype == torch.float32:
        pack_linears(target.model, keep=(target.model.get_output_embeddings(),))


def prepare_drafter(drafter: Drafter, target: Target) -> Drafter:
    """Bind a head to its target and make it ready for inference in place, as `prepare_for_inference` does."""
    drafter.bind(target.embed_weight, target.lm_head_weight, target.model.get_output_embeddings())
    if target.device.type == "cpu" and target.dtype == torch.float32:
        pack_linears(drafter, keep=tuple(m for m in (drafter.fc, drafter.lm_head) if m is not None))
    return drafter.requires_grad_(False)


def load_bound_drafter(target: Target, speculative: SpeculativeConfig) -> Drafter:
    """Load a head, refuse it when it is of the wrong kind or made for another target, and bind it to this one."""
    drafter = load_drafter(speculative.model, speculative.kind, target.dtype, target.device)
    drafter.config, remark = with_aux_layers(drafter.config, target.num_layers)
    if remark:
        logger.warning("%s: %s", speculative.model, remark)
    check_fits(
        drafter.config, vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_layers=target.num_layers
    )
    return prepare_drafter(drafter, target)


def load_engine(
    model: str | Target,
    speculative_config: str | Mapping[str, Any] | SpeculativeConfig | None = None,
    dtype: str = "auto",
    device: str | torch.device | None = None,
    config: EngineConfig | None = None,
) -> Engine:
    """Load a target (or take a loaded one) and, with a speculative config, its head. Raises InputError.

    The target is made ready for inference in place (`prepare_for_inference`).
    """
    speculative = SpeculativeConfig.parse(speculative_config) if speculative_config is not None else None
    target = model if isinstance(model, Target) else load_target(model, dtype, device)
    prepare_for_inference(target)
    if speculative is None:
        return Engine(target, config=config)
    drafter = load_bound_drafter(target, speculative)
    return Engine(
        target,
        drafter,
        speculative.num_speculative_tokens,
        config,
        speculative.synthetic_rates,
        speculative.num_speculative_tokens_per_batch_size,
    )
