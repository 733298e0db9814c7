"""A new drafter for a target: its dimensions, its mask token, its first weights."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from peagle.config.training import TrainConfig
from peagle.drafter.config import DrafterConfig
from peagle.drafter.model import Drafter
from peagle.errors import InputError
from peagle.target.model import Target
from peagle.training.draft_vocab import DraftVocab
from peagle.training.init_from_head import copy_head, with_conventions_of

NOISE = 0.02  # standard deviation of random weights
PLAIN_LLAMA = ("llama", "mistral", "smollm3")  # layers whose weights mean the same in a drafter layer


def choose_mask_token(target: Target, seen: np.ndarray, wanted: int | None) -> int:
    """An id of the target's vocabulary that never occurs in text: docs/method.md, "The checkpoint": `ptd_token_id`.

    seen [V] bool: ids that occur in the data. Added (special) tokens that the chat template does not name come first,
    from the last one back, then ids that the tokenizer does not define, then any unseen id from the top. Raises
    InputError when `wanted` occurs in the data or lies outside the vocabulary, or when every id occurs.
    """
    vocab_size = len(seen)
    if wanted is not None:
        if not 0 <= wanted < vocab_size:
            raise InputError(f"mask_token_id: got {wanted}, expected 0 to {vocab_size - 1}")
        if seen[wanted]:
            raise InputError(f"mask_token_id: {wanted} occurs in the training data, expected a token that never does")
        return wanted
    reserved = set(target.eos_token_ids)
    added: list[int] = []
    undefined: list[int] = []
    if target.tokenizer is not None:
        tokenizer = target.tokenizer
        template = str(getattr(tokenizer, "chat_template", None) or "")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
            if getattr(tokenizer, name, None) is not None:
                reserved.add(getattr(tokenizer, name))
        added = [i for i, token in tokenizer.added_tokens_decoder.items() if str(token) not in template]
        defined = set(tokenizer.get_vocab().values())
        undefined = [i for i in range(vocab_size) if i not in defined]
    for candidates in (sorted(added, reverse=True), undefined[::-1], range(vocab_size - 1, -1, -1)):
        for i in candidates:
            if i < vocab_size and not seen[i] and i not in reserved:
                return int(i)
    raise InputError("mask_token_id: every id of the vocabulary occurs in the data, expected one that never does")


def drafter_config(config: TrainConfig, target: Target, mask_token_id: int | None) -> DrafterConfig:
    """The head's config: the target's dimensions wherever `config` names none. Raises InputError."""
    of = target.config
    hidden = config.hidden_size or target.hidden_size
    aux = config.aux_layer_ids or target.default_aux_layer_ids()
    target.check_aux_layer_ids(aux)
    heads = config.num_attention_heads or int(of.num_attention_heads)
    kv_heads = config.num_key_value_heads or min(heads, target.num_key_value_heads)
    other_width = hidden != target.hidden_size
    reduced = config.draft_vocab_size is not None and config.draft_vocab_size != target.vocab_size
    rope = getattr(of, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0}
    if "rope_type" not in rope:  # one set a layer type (Gemma 3): the drafter attends fully
        rope = rope.get("full_attention") or next(iter(rope.values()))
    if rope.get("partial_rotary_factor", 1.0) not in (None, 1.0) and rope.get("rope_type") == "default":
        rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    intermediate = config.intermediate_size or getattr(of, "intermediate_size", None) or 4 * hidden
    return DrafterConfig(
        kind=config.kind,
        hidden_size=hidden,
        intermediate_size=int(intermediate),
        num_hidden_layers=config.layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=config.head_dim or target.head_dim,
        vocab_size=target.vocab_size,
        draft_vocab_size=config.draft_vocab_size or 0,
        target_hidden_size=target.hidden_size,
        aux_hidden_state_layer_ids=tuple(aux),
        rms_norm_eps=float(getattr(of, "rms_norm_eps", 1e-6)),
        rope_parameters=dict(rope),
        max_position_embeddings=config.max_position_embeddings or target.max_model_len,
        norm_before_residual=config.norm_before_residual,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
        mask_token_id=mask_token_id,
        k_train=config.depths,
        own_embed_tokens=config.train_embeddings or other_width,
        # stock vLLM shares a target's LM head only over the whole vocabulary
        own_lm_head=config.train_lm_head or other_width or reduced,
    )


def new_drafter(
    config: TrainConfig, target: Target, mask_token_id: int | None, vocab: DraftVocab | None
) -> tuple[Drafter, list[str]]:
    """A drafter with its first weights in float32 on the target's device, not bound yet; and remarks to print.

    Deterministic in `config.seed`. Own embeddings and LM head begin as the target's where the width allows it; they are
    trained only when `train_embeddings` / `train_lm_head` say so (or nothing else could make them useful). An `init`
    that names a head gives its weights to all of them.
    """
    remarks: list[str] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        settings = drafter_config(config, target, mask_token_id)
        if config.init_head is not None:
            settings = with_conventions_of(settings, config.init_head)
        drafter = Drafter(settings).to(torch.float32)
        _random_weights(drafter)
        if config.init == "target":
            remarks.append(_copy_target_layers(drafter, target))
    same_width = drafter.config.hidden_size == target.hidden_size
    with torch.no_grad():
        if vocab is not None and drafter.d2t is not None:
            drafter.d2t.copy_(vocab.d2t)
        if drafter.embed_tokens is not None and same_width:
            drafter.embed_tokens.weight.copy_(target.embed_weight)
        if drafter.lm_head is not None and same_width:
            rows = target.lm_head_weight.cpu()
            drafter.lm_head.weight.copy_(rows if vocab is None else rows[vocab.target_ids])
    if config.init_head is not None:
        remarks.append(copy_head(drafter, config.init_head))
    if drafter.embed_tokens is not None:
        drafter.embed_tokens.weight.requires_grad_(config.train_embeddings or not same_width)
    if drafter.lm_head is not None:
        drafter.lm_head.weight.requires_grad_(config.train_lm_head or not same_width)
    return drafter.to(target.device), remarks


def _random_weights(drafter: Drafter) -> None:
    """Linear weights from N(0, 0.02^2), outputs of residual branches smaller by sqrt(2 layers); norms at 1."""
    for name, module in drafter.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            std = NOISE
            if name.endswith(("o_proj", "down_proj")):
                std /= (2 * drafter.config.num_hidden_layers) ** 0.5
            nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    _spread_fc(drafter)
    if drafter.mask_hidden is not None:
        nn.init.normal_(drafter.mask_hidden)


@torch.no_grad()
def _spread_fc(drafter: Drafter) -> None:
    """fc sees 3H inputs of very different scales; a variance-preserving start."""
    nn.init.normal_(drafter.fc.weight, std=drafter.fc.in_features**-0.5)


@torch.no_grad()
def _copy_target_layers(drafter: Drafter, target: Target) -> str:
    """Start from the target's last decoder layers where shapes fit; returns what was done.

    Layer 0: q, k and v go into the half that reads the hidden state, the half that reads the embedding stays small and
    random. `fc` passes the last auxiliary state through, plus small noise, and `mask_hidden` starts as noise.
    """
    config = drafter.config
    count = config.num_hidden_layers
    family = getattr(target.config, "model_type", "")
    if family not in PLAIN_LLAMA:
        return f"init: {family!r} layers differ from a drafter's, starting from random weights"
    if count > target.num_layers:
        return f"init: {count} layers wanted, the target has {target.num_layers}; starting from random weights"
    sources: Sequence[nn.Module] = [target.layers[target.num_layers - count + i] for i in range(count)]
    pairs: list[tuple[Tensor, Tensor]] = []
    hidden = config.hidden_size
    for i, (own, source) in enumerate(zip(drafter.layers, sources, strict=True)):
        weights = dict(source.named_parameters())
        for name, parameter in own.named_parameters():
            if name == "hidden_norm.weight":
                pairs.append((parameter.data, weights["input_layernorm.weight"]))
            elif i == 0 and name == "input_layernorm.weight":
                pairs.append((parameter.data, target.layers[0].get_parameter("input_layernorm.weight")))
            elif name not in weights:
                return f"init: the target's layers have no {name}, starting from random weights"
            elif i == 0 and name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                pairs.append((parameter.data[:, hidden:], weights[name]))
            else:
                pairs.append((parameter.data, weights[name]))
        if len(weights) > len(list(own.named_parameters())):
            return "init: the target's layers have parameters that a drafter's lack, starting from random weights"
    norm = getattr(target.decoder, "norm", None)
    if norm is not None:
        pairs.append((drafter.norm.weight.data, norm.weight))
    for own_weight, source_weight in pairs:
        if own_weight.shape != source_weight.shape:
            return (
                f"init: a weight of the target's layers has shape {list(source_weight.shape)}, the drafter's "
                f"{list(own_weight.shape)}; starting from random weights"
            )
    for own_weight, source_weight in pairs:
        own_weight.copy_(target.read(source_weight).to(own_weight.device, own_weight.dtype))
    for name in ("q_proj", "k_proj", "v_proj"):
        drafter.get_parameter(f"layers.0.self_attn.{name}.weight")[:, :hidden] *= 0.1
    last = drafter.fc.in_features - target.hidden_size
    drafter.fc.weight.mul_(0.1)
    drafter.fc.weight[:, last:].add_(torch.eye(hidden, target.hidden_size))
    return f"init: copied the target's last {count} layer(s) and final norm"
