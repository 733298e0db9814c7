"""The drafter network (docs/method.md, "The network"): one module for training and for the engine.

Attention is handed in, because a training step, a prefill and a decoding step see the same rows through different
masks and caches. What is computed around it is therefore the same code everywhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from peagle.drafter.config import DrafterConfig
from peagle.drafter.draft_vocabulary import DraftVocabulary
from peagle.errors import InputError

# (layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) -> [T, Hq, D], or None where nobody reads the layer's output (of
# the last one: the keys and values were all that was wanted); RoPE has been applied to q and k.
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor | None]


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [T, heads, D] by cos and sin [T, 1, D], Llama's half-split convention."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def repeat_last(x: Tensor, rows: int) -> Tensor:
    """x [R, ...] with its last row repeated up to `rows` rows."""
    return x if x.shape[0] == rows else torch.cat((x, x[-1:].expand(rows - x.shape[0], *x.shape[1:])))


def make_rotary(config: DrafterConfig) -> LlamaRotaryEmbedding:
    """Transformers' own rotary embedding, so that every RoPE type it knows (yarn, llama3, ...) works here."""
    try:
        return LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=dict(config.rope_parameters),
            )
        )
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"rope_parameters: got {config.rope_parameters}, expected a RoPE type of Transformers with its settings "
            f"({error.__class__.__name__}: {error})"
        ) from error


class DrafterAttention(nn.Module):
    """Grouped-query self-attention; layer 0 reads 2H, later layers H."""

    def __init__(self, config: DrafterConfig, input_size: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.attention_bias
        q_size, kv_size = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(input_size, q_size, bias=bias)
        self.k_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.v_proj = nn.Linear(input_size, kv_size, bias=bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=bias)

    def project(self, x: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [R, in] -> q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D], T = `rows`; the last of R < T rows stands for all
        that follow."""
        heads = (rows, -1, self.head_dim)
        q, k, v = (repeat_last(proj(x), rows).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """RoPE by cos and sin [T, 1, D]."""
        return apply_rope(q, cos, sin), apply_rope(k, cos, sin)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layer: int, attend: Attend) -> Tensor | None:
        q, k, v = self.project(x, cos.shape[0])
        out = attend(layer, *self.rotate(q, k, cos, sin), v)
        return None if out is None else self.o_proj(out.reshape(out.shape[0], -1))


class DrafterMLP(nn.Module):
    """SwiGLU, as Llama's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DrafterLayer(nn.Module):
    """One decoder layer. Layer 0 also reads the token embeddings (EAGLE-3, figure 5 of arXiv 2503.01840)."""

    def __init__(self, config: DrafterConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm_before_residual = config.norm_before_residual
        self.self_attn = DrafterAttention(config, config.hidden_size * (2 if layer == 0 else 1))
        self.mlp = DrafterMLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        if layer == 0:
            self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden: Tensor, embeds: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        if self.layer == 0:
            normed = self.hidden_norm(hidden)
            residual = normed if self.norm_before_residual else hidden
            x = torch.cat((self.input_layernorm(embeds), normed), dim=-1)
        else:
            residual = hidden
            x = self.input_layernorm(hidden)
        attended = self.self_attn(x, cos, sin, self.layer, attend)
        if attended is None:
            return hidden
        hidden = repeat_last(residual, attended.shape[0]) + attended
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Drafter(nn.Module):
    """A P-EAGLE or EAGLE-3 head. Rows are flat: T rows of any requests, documents or depths."""

    mask_hidden: nn.Parameter | None
    d2t: Tensor | None
    # keep a layer's input for the backward and compute the layer again there; training sets it
    checkpoint_layers: bool = False

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(config.aux_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(DrafterLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embed_tokens else None
        self.lm_head = (
            nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False) if config.own_lm_head else None
        )
        self.input_norm = nn.RMSNorm(config.aux_size, eps=config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(
                nn.RMSNorm(config.target_hidden_size, eps=config.rms_norm_eps)
                for _ in range(config.num_aux_hidden_states)
            )
            if config.fc_norm
            else None
        )
        if config.kind == "p-eagle":
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, config.aux_size))
        else:
            self.register_parameter("mask_hidden", None)
        offsets = torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.reduced_vocab else None
        self.register_buffer("d2t", offsets)
        self.rotary = make_rotary(config)
        # the target's: neither parameters nor saved
        self._shared: dict[str, Tensor] = {}
        self._faster: dict[str, Callable[[Tensor], Tensor]] = {}  # other forms of them; a dict: no submodules either
        self.vocabulary: DraftVocabulary | None = None  # what the engine lets it draft, where that is not everything

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Drafter:
        """As nn.Module's, but RoPE's frequencies stay float32: rounded to bfloat16 they are wrong at long positions."""
        super()._apply(fn, recurse)
        frequencies = self.rotary.inv_freq
        if frequencies.dtype in (torch.bfloat16, torch.float16):
            self.rotary = make_rotary(self.config).to(frequencies.device)
        return self

    def bind(
        self, target_embed: Tensor, target_lm_head: Tensor, lm_head: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        """Share the target's embeddings [V, H] and LM head [V, H] where this head has none of its own.

        With a reduced draft vocabulary the rows of the target's LM head that `d2t` names are copied out once. lm_head:
        a faster form of the whole LM head (rows [T, H] to logits [T, V]), used where it fits.
        """
        if self.embed_tokens is None:
            self._shared["embed_tokens"] = target_embed.detach()
        if self.lm_head is None:
            head = target_lm_head.detach()
            if self.d2t is not None:
                ids = self.to_target_ids(torch.arange(self.config.draft_vocab_size, device=self.d2t.device))
                head = head[ids.to(head.device)]
            self._shared["lm_head"] = head
            self._faster = {} if lm_head is None or self.d2t is not None else {"lm_head": lm_head}

    def share_lm_head(self, lm_head: Callable[[Tensor], Tensor]) -> None:
        """Use another form of the LM head that `bind` gave: rows [T, H] to logits [T, Vd].

        Rows that `bind` copied out of the target's go, so that this is for inference only.
        """
        self._faster["lm_head"] = lm_head
        if self.d2t is not None:
            del self._shared["lm_head"]

    @property
    def bound(self) -> bool:
        """Whether `bind` has given this head the target's tensors that it lacks."""
        return (self.embed_tokens is not None or "embed_tokens" in self._shared) and (
            self.lm_head is not None or "lm_head" in self._shared or "lm_head" in self._faster
        )

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token ids [T] -> embeddings [T, H]."""
        return F.embedding(token_ids, self.embed_weight())

    def embed_weight(self) -> Tensor:
        """Embeddings in use, [V, H]: the head's own or the target's."""
        return self.embed_tokens.weight if self.embed_tokens is not None else self._shared["embed_tokens"]

    def lm_head_weight(self) -> Tensor:
        """LM head in use, [Vd, H]: the head's own or the target's rows."""
        return self.lm_head.weight if self.lm_head is not None else self._shared["lm_head"]

    def combine(self, aux: Tensor) -> Tensor:
        """Auxiliary states [T, 3H] -> hidden input [T, H]: optional norms, then `fc`."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def mask_state(self) -> Tensor:
        """The hidden input [H] of every MTP row: `mask_hidden` through the same norms and `fc` (h_shared)."""
        assert self.mask_hidden is not None, "an EAGLE-3 head has no mask_hidden"
        return self.combine(self.mask_hidden.view(1, -1))[0]

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Run the layers over T rows.

        embeds [T, H] (`embed`), hidden [T, H] (`combine`, `mask_state` or an earlier feedback), positions [T] the RoPE
        positions (anchor + depth). Of rows at the end that are alike but for their positions, as MTP rows are, embeds
        and hidden need to have one only: layer 0 then makes their queries, keys and values once. Returns (normed [T, H]
        for `logits`, feedback [T, H] for EAGLE-3's next pass: the pre-norm state, or the normed one when
        `norm_output`).
        """
        cos, sin = self.rotary(hidden, positions[None])
        cos, sin = cos[0, :, None], sin[0, :, None]
        again = self.checkpoint_layers and torch.is_grad_enabled()
        for layer in self.layers:
            if again:  # nothing in a layer is random: no generator's state to keep
                hidden = checkpoint(
                    layer, hidden, embeds, cos, sin, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, embeds, cos, sin, attend)
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden

    def logits(self, normed: Tensor) -> Tensor:
        """Normed rows [T, H] -> logits over the draft vocabulary [T, Vd]."""
        if self.vocabulary is not None:
            return self.vocabulary.logits(normed)
        if self.lm_head is not None:  # the module, not its weight: the engine may have replaced it by a packed one
            return self.lm_head(normed)
        if "lm_head" in self._faster:
            return self._faster["lm_head"](normed)
        return F.linear(normed, self._shared["lm_head"])

    def to_target_ids(self, draft_ids: Tensor) -> Tensor:
        """Draft vocabulary ids -> target vocabulary ids (`d2t` holds offsets)."""
        if self.vocabulary is not None:
            return self.vocabulary.ids[draft_ids]
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
