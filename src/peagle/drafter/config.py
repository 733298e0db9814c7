"""What a drafter head is made of, as its `config.json` says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

from peagle.errors import InputError

Kind = Literal["p-eagle", "eagle3"]
KINDS: tuple[Kind, ...] = ("p-eagle", "eagle3")


@dataclass(frozen=True)
class DrafterConfig:
    """The dimensions and conventions of one head (DESIGN sections 2 and 3).

    `aux_hidden_state_layer_ids` index the target: id i is the state that enters layer i, Transformers'
    `hidden_states[i]`. `k_train` is the depth that the head was trained for (None when its checkpoint does not say).
    """

    kind: Kind
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    aux_hidden_state_layer_ids: tuple[int, ...]
    draft_vocab_size: int = 0  # 0: the whole vocabulary
    target_hidden_size: int = 0  # 0: the same as hidden_size
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 8192
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None
    k_train: int | None = None
    own_embed_tokens: bool = False
    own_lm_head: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        object.__setattr__(self, "aux_hidden_state_layer_ids", tuple(self.aux_hidden_state_layer_ids))
        if self.kind not in KINDS:
            raise InputError(f"kind: got {self.kind!r}, expected one of {', '.join(KINDS)}")
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "vocab_size",
            "max_position_embeddings",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: got {getattr(self, name)}, expected a positive integer")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads: got {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise InputError(f"draft_vocab_size: got {self.draft_vocab_size}, expected 1 to {self.vocab_size}")
        ids = self.aux_hidden_state_layer_ids
        if not ids or min(ids) < 0 or any(a >= b for a, b in pairwise(ids)):
            # ascending, because vLLM hands the states over in layer order whatever the order written here
            raise InputError(
                f"eagle_aux_hidden_state_layer_ids: got {list(ids)}, expected the ids (0 or more, ascending, each "
                "once) of the target layers whose input the head reads"
            )
        if self.kind == "p-eagle":
            if self.mask_token_id is None:
                raise InputError(
                    "ptd_token_id: missing, expected the id of the mask token (a P-EAGLE head cannot run without)"
                )
            if not 0 <= self.mask_token_id < self.vocab_size:
                raise InputError(f"ptd_token_id: got {self.mask_token_id}, expected 0 to {self.vocab_size - 1}")
        if self.norm_before_fc and self.fc_norm:
            raise InputError("norm_before_fc, fc_norm: both are set, expected at most one of them")

    @property
    def aux_size(self) -> int:
        """Width of the concatenated auxiliary states, 3H for three layers."""
        return len(self.aux_hidden_state_layer_ids) * self.target_hidden_size

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
