"""An engine from names: target, head and settings, checked against each other."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle.config.engine import EngineConfig
from peagle.config.speculative import SpeculativeConfig, WeightDtype
from peagle.drafter.config import with_aux_layers
from peagle.drafter.draft_vocabulary import FILE, DraftVocabulary, read_draft_vocabulary
from peagle.drafter.fit import check_fits
from peagle.drafter.loading import load_drafter, resolve_head
from peagle.drafter.model import Drafter
from peagle.engine.engine import Engine
from peagle.errors import InputError
from peagle.kernels.experts import runs_experts
from peagle.kernels.half_linear import HalfLinear, fits_half, half_product, halve_linears, has_half
from peagle.kernels.packed_linear import pack_linears
from peagle.kernels.rms_norm import fuse_rms_norms
from peagle.target.fused import can_fuse, fuse_decoder_layers, join_layers
from peagle.target.fused_experts import fuse_experts
from peagle.target.head_fit import check_by_config
from peagle.target.loading import load_target
from peagle.target.model import Target

logger = logging.getLogger(__name__)


def prepare_for_inference(target: Target, fuse_mixtures: bool = True) -> None:
    """Replace modules of the target by faster ones that compute the same; calling it again changes nothing.

    On a CPU in float32 the linears get packed weights, in float16 where that holds them exactly, and drop their own; on
    a GPU mixtures of experts do (fuse_mixtures), with MXFP4 where that holds them. Such a target cannot be saved or
    trained.
    """
    fuse_rms_norms(target.model)
    if target.device.type == "cuda":
        if fuse_mixtures and runs_experts(target.device):
            fuse_experts(target.model)
        fuse_decoder_layers(target)
    if target.device.type == "cpu" and target.dtype == torch.float32:
        keep = (target.model.get_output_embeddings(),)
        if can_fuse(target):
            join_layers(target.layers)
        halve_linears(target.model, keep, exact=True)
        pack_linears(target.model, keep)
        fuse_decoder_layers(target)
        _return_memory()


def _return_memory() -> None:
    """Give what replaced weights lay in back to the system, where the C library keeps it otherwise (glibc)."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def prepare_drafter(
    drafter: Drafter, target: Target, weight_dtype: WeightDtype = "auto", listed: Tensor | None = None
) -> Drafter:
    """Bind a head to its target and make it ready for inference in place, as `prepare_for_inference` does.

    weight_dtype: SpeculativeConfig's draft_weight_dtype. listed: on a CPU in float32, the tokens [N] that a head with
    the whole vocabulary drafts, beside those of the texts; None: all. Raises InputError for float16 where it cannot be.
    """
    drafter.bind(target.embed_weight, target.lm_head_weight, target.model.get_output_embeddings())
    on_cpu = _in_float32_on_cpu(target)
    if weight_dtype == "float16" and not (on_cpu and has_half()):
        raise InputError(
            f"draft_weight_dtype: got 'float16' with a {str(target.dtype).removeprefix('torch.')} target on "
            f"{target.device.type}, expected that only on a CPU with FBGEMM, in float32"
        )
    if on_cpu:
        keep = tuple(m for m in (drafter.fc, drafter.lm_head) if m is not None)
        fuse_rms_norms(drafter)
        join_layers(drafter.layers)
        halve = weight_dtype != "target" and has_half()
        if listed is not None and len(listed) < target.vocab_size:
            weight = drafter.lm_head_weight().detach()
            half = halve and fits_half(weight)
            drafter.vocabulary = DraftVocabulary(
                listed, weight, half_product if half else lambda rows: partial(F.linear, weight=rows)
            )
        if halve:
            halve_linears(drafter, keep)
            if drafter.vocabulary is None:
                halve_shared_lm_head(drafter, target)
        pack_linears(drafter, keep)
    return drafter.requires_grad_(False)


def _in_float32_on_cpu(target: Target) -> bool:
    return target.device.type == "cpu" and target.dtype == torch.float32


def listed_tokens(drafter: Drafter, target: Target, speculative: SpeculativeConfig) -> Tensor | None:
    """The tokens [N] that a head's list names, where draft_vocabulary says to draft from it; None: it drafts what it
    can. Raises InputError for a list that is asked for and cannot be used."""
    choice = speculative.draft_vocabulary
    possible = _in_float32_on_cpu(target) and not drafter.config.reduced_vocab
    if choice == "whole" or (choice == "auto" and not possible):
        return None
    if not possible:
        what = f"a {str(target.dtype).removeprefix('torch.')} target on {target.device.type}"
        if drafter.config.reduced_vocab:
            what = f"a head with {drafter.config.draft_vocab_size} draft tokens of its own"
        raise InputError(
            f"draft_vocabulary: got 'listed' with {what}, expected that only on a CPU in float32, for a head that "
            "drafts from the whole vocabulary"
        )
    listed = read_draft_vocabulary(resolve_head(speculative.model), target.vocab_size)
    if listed is None and choice == "listed":
        raise InputError(
            f"draft_vocabulary: got 'listed', but {speculative.model} has no {FILE}, expected auto or whole"
        )
    return listed


def halve_shared_lm_head(drafter: Drafter, target: Target) -> None:
    """Give a head without its own LM head the target's with float16 weights: one copy for all heads of a target."""
    if drafter.lm_head is not None or not fits_half(target.lm_head_weight):
        return
    if drafter.d2t is not None:
        drafter.share_lm_head(half_product(drafter.lm_head_weight()))
        return
    if target.draft_lm_head is None:
        head = target.model.get_output_embeddings()
        target.draft_lm_head = head.product if isinstance(head, HalfLinear) else half_product(target.lm_head_weight)
    drafter.share_lm_head(target.draft_lm_head)


def load_bound_drafter(target: Target, speculative: SpeculativeConfig) -> Drafter:
    """Load a head, refuse it when it is of the wrong kind or made for another target, and bind it to this one."""
    drafter = load_drafter(speculative.model, speculative.kind, target.dtype, target.device)
    drafter.config, remark = with_aux_layers(drafter.config, target.num_layers)
    if remark:
        logger.warning("%s: %s", speculative.model, remark)
    check_fits(
        drafter.config, vocab_size=target.vocab_size, hidden_size=target.hidden_size, num_layers=target.num_layers
    )
    return prepare_drafter(drafter, target, speculative.draft_weight_dtype, listed_tokens(drafter, target, speculative))


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
    if isinstance(model, Target):
        target = model
    else:
        check_by_config(model, *((speculative.model, speculative.kind) if speculative is not None else ()))
        target = load_target(model, dtype, device)
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
        speculative.confidence_threshold,
        speculative.draft_window,
    )
