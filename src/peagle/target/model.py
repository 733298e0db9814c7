"""The target: any decoder-only Transformers model, run over paged KV caches and asked for its auxiliary states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from peagle.drafter.config import vllm_aux_layer_ids
from peagle.errors import InputError
from peagle.target.paged_attention import KVCache, PagedBatch, attend_paged
from peagle.target.sharding import HomeWeights, home_weights, read_parameter
from peagle.target.support import check_paged, decoder_layers, refuse_attention

PAGED = "peagle_paged"
CAUSAL = "peagle_causal"


def _paged_attention_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    *,
    paged: tuple[PagedBatch, KVCache] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention interface: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> [1, T, Hq, D]."""
    if paged is None:
        refuse_attention(module)
    batch, caches = paged
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    out = attend_paged(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        caches[module.layer_idx],  # type: ignore[index]
        batch,
        scale,
        sliding_window,
        s_aux,
        softcap,
    )
    return out[None], None


AttentionInterface.register(PAGED, _paged_attention_interface)
# Transformers' own function under a name for which it makes no mask: it would look through the positions for packed
# sequences, which waits for the device in every pass
AttentionInterface.register(CAUSAL, sdpa_attention_forward)


def _only_causal(config: Any) -> bool:
    """Whether every layer's mask is the plain causal one, which needs not be made."""
    windowed = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    return not windowed and set(getattr(config, "layer_types", None) or ()) <= {"full_attention"}


@dataclass
class TargetStates:
    """What training needs of B x L positions: aux [B, L, 3H] and hidden [B, L, H] (the LM head's input)."""

    aux: Tensor
    hidden: Tensor


@dataclass
class Target:
    """A loaded target model with its tokenizer. `config` is the language model's own (text) config."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name_or_path: str
    eos_token_ids: frozenset[int] = frozenset()
    total_layers: int | None = None  # where the model was loaded without them
    draft_lm_head: Callable[[Tensor], Tensor] | None = None  # a faster, coarser LM head for drafts: rows to logits
    # the decoder over a paged cache in another form: token ids, positions, batch, caches, auxiliary layers to states
    fused: Callable[..., tuple[Tensor, Tensor | None]] | None = None
    # of a model spread over several devices: where its states and what a head shares with it are wanted
    home: torch.device | None = None
    _captured: dict[int, Tensor] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.model.eval().requires_grad_(False)
        self.config = self.model.config.get_text_config()
        if getattr(self.config, "attn_logit_softcapping", None):
            # Gemma 2: PyTorch's fused attention leaves the soft cap out without a word
            self.model.set_attn_implementation("eager")
        self.own_attention: str = self.model.config._attn_implementation
        causal = self.own_attention == "sdpa" and _only_causal(self.config)
        self.dense_attention = CAUSAL if causal else self.own_attention
        self.decoder = self.model.get_decoder()
        self.layers: nn.ModuleList = decoder_layers(self.model)
        for i, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._capture(i), with_kwargs=True)
        self._wanted: frozenset[int] = frozenset()
        self._at_home: HomeWeights | None = None if self.home is None else home_weights(self.model, self.home)

    def _capture(self, layer: int) -> Any:
        def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if layer in self._wanted:
                self._captured[layer] = args[0] if args else kwargs["hidden_states"]

        return keep

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        return int(self.embed_weight.shape[0])

    @property
    def num_layers(self) -> int:
        return len(self.layers) or self.total_layers or 0

    @property
    def num_key_value_heads(self) -> int:
        return int(getattr(self.config, "num_key_value_heads", None) or self.config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return int(getattr(self.config, "head_dim", None) or self.hidden_size // self.config.num_attention_heads)

    @property
    def max_model_len(self) -> int:
        return int(self.config.max_position_embeddings)

    @property
    def embed_weight(self) -> Tensor:
        """Input embeddings [V, H] as a drafter sees them."""
        if self._at_home is not None:
            return self._at_home.embed
        return self.model.get_input_embeddings().weight

    @property
    def lm_head_weight(self) -> Tensor:
        """LM head [V, H]."""
        if self._at_home is not None:
            return self._at_home.lm_head
        return self.model.get_output_embeddings().weight

    def read(self, parameter: Tensor) -> Tensor:
        """A parameter of the model, wherever it lies; one that was offloaded (a meta tensor) is read to the host."""
        return read_parameter(self.model, parameter)

    def check_paged(self) -> None:
        """Refuse a model that cannot run over paged caches; `encode` can do with it all the same. Raises InputError."""
        if self.home is not None:
            raise InputError("target_device_map: the engine needs a model on one device, expected none")
        check_paged(self.model, self.config)

    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """vLLM's default choice of auxiliary layers, (2, n/2, n-3).

        Below seven layers these are not three layers in ascending order, so the first, middle and last are taken.
        """
        n = self.num_layers
        if n < 3:
            raise InputError(f"model: has {n} layers, expected at least 3 to take auxiliary hidden states from")
        return vllm_aux_layer_ids(n) if n >= 7 else (0, n // 2, n - 1)

    def check_aux_layer_ids(self, ids: Sequence[int]) -> None:
        for i in ids:
            if not 0 <= i < self.num_layers:
                raise InputError(
                    f"eagle_aux_hidden_state_layer_ids: {i} is no layer of the target, expected 0 to "
                    f"{self.num_layers - 1}"
                )

    @contextmanager
    def _mode(self, attention: str, aux_layer_ids: Sequence[int]) -> Iterator[None]:
        self._set_attention(attention)
        self._wanted = frozenset(aux_layer_ids)
        try:
            yield
        finally:
            self._captured.clear()
            self._wanted = frozenset()
            self._set_attention(self.own_attention)  # the model stays usable by itself

    def _set_attention(self, attention: str) -> None:
        for config in {id(c): c for c in (self.model.config, self.config)}.values():
            if config._attn_implementation != attention:
                config._attn_implementation = attention

    def _aux(self, ids: Sequence[int]) -> Tensor:
        return torch.cat([self._captured[i] for i in ids], dim=-1)

    @torch.no_grad()
    def encode(self, input_ids: Tensor, aux_layer_ids: Sequence[int]) -> TargetStates:
        """Run right-padded sequences [B, L] densely and causally, without a cache (training).

        Padding on the right never reaches a real position, so no mask is needed; rows of padding hold no meaning.
        """
        with self._mode(self.dense_attention, aux_layer_ids):
            if self.home is None:
                hidden = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
                return TargetStates(self._aux(aux_layer_ids), hidden)
            first = self.model.get_input_embeddings().weight.device
            if first.type != "meta":  # what is offloaded is moved to by its hook
                input_ids = input_ids.to(first)
            hidden = self.decoder(input_ids=input_ids, use_cache=False).last_hidden_state
            self._captured = {i: state.to(self.home) for i, state in self._captured.items()}
            return TargetStates(self._aux(aux_layer_ids), hidden.to(self.home))

    def lm_logits(self, hidden: Tensor) -> Tensor:
        """LM head's input [..., H] -> logits [..., V], with the model's own scale and soft cap."""
        logits = self.model.get_output_embeddings()(hidden) if self._at_home is None else self._at_home.logits(hidden)
        if (scale := getattr(self.config, "logit_scale", None)) is not None:  # Cohere
            logits = logits * scale
        if (scaling := getattr(self.config, "logits_scaling", None)) is not None:  # Granite
            logits = logits / scaling
        if cap := getattr(self.config, "final_logit_softcapping", None):  # Gemma
            logits = cap * torch.tanh(logits / cap)
        return logits

    def new_kv_cache(self, num_blocks: int, block_size: int, dtype: torch.dtype | None = None) -> KVCache:
        """One K and one V pool a layer, each [num_blocks, block_size, Hkv, D]."""
        shape = (num_blocks, block_size, self.num_key_value_heads, self.head_dim)
        make = lambda: torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)  # noqa: E731
        return [(make(), make()) for _ in self.layers]

    @torch.no_grad()
    def forward_paged(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        kv_cache: KVCache,
        logit_rows: Tensor | slice | None = None,
        aux_layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run T flat rows (token_ids, positions [T]) over the paged cache, writing their keys and values.

        Returns logits [R, V] of `logit_rows` (None: no logits) and the auxiliary states [T, 3H] of `aux_layer_ids`
        (none when empty).
        """
        hidden, aux = self.states_paged(token_ids, positions, batch, kv_cache, aux_layer_ids)
        return None if logit_rows is None else self.lm_logits(hidden[logit_rows]), aux

    def states_paged(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: PagedBatch,
        kv_cache: KVCache,
        aux_layer_ids: Sequence[int] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """As `forward_paged`, but what the LM head reads [T, H] in place of logits."""
        if self.fused is not None:
            return self.fused(token_ids, positions, batch, kv_cache, aux_layer_ids)
        with self._mode(PAGED, aux_layer_ids):
            hidden = self.decoder(
                input_ids=token_ids[None],
                position_ids=positions[None],
                use_cache=False,
                paged=(batch, kv_cache),
            ).last_hidden_state[0]
            return hidden, self._aux(aux_layer_ids)[0] if aux_layer_ids else None
