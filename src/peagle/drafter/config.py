"""What a drafter head is made of, as its `config.json` says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from peagle.errors import InputError

Kind = Literal["p-eagle", "eagle3"]
KINDS: tuple[Kind, ...] = ("p-eagle", "eagle3")
DEFAULT_AUX_STATES = 3


def vllm_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The auxiliary layers that vLLM takes from a target of so many layers when a head's config names none."""
    return (2, num_layers // 2, num_layers - 3)


@dataclass(frozen=True)
class DrafterConfig:
    """The dimensions and conventions of one head (docs/method.md, "The network", "The checkpoint").

    `aux_hidden_state_layer_ids` index the target: id i is the state that enters layer i, Transformers'
    `hidden_states[i]`. They are empty when the checkpoint names none, as many of other makers do not: then
    `num_aux_hidden_states` counts them and `with_aux_layers` fills them in. `k_train` is the depth that the head was
    trained for, `max_train_length` its longest training document in tokens, `draft_window` how many of the latest
    positions its rows are to see (None when its checkpoint does not say).
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
    num_aux_hidden_states: int = 0  # 0: as many as there are ids, or 3
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
    max_train_length: int | None = None
    draft_window: int | None = None
    own_embed_tokens: bool = False
    own_lm_head: bool = False
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "draft_vocab_size", self.draft_vocab_size or self.vocab_size)
        object.__setattr__(self, "target_hidden_size", self.target_hidden_size or self.hidden_size)
        object.__setattr__(self, "aux_hidden_state_layer_ids", tuple(self.aux_hidden_state_layer_ids))
        count = len(self.aux_hidden_state_layer_ids) or self.num_aux_hidden_states or DEFAULT_AUX_STATES
        object.__setattr__(self, "num_aux_hidden_states", count)
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
            "num_aux_hidden_states",
        ):
            if getattr(self, name) < 1:
                raise InputError(f"{name}: got {getattr(self, name)}, expected a positive integer")
        for name in ("max_train_length", "draft_window"):
            length = getattr(self, name)
            if length is not None and (type(length) is not int or length < 1):
                raise InputError(f"{name}: got {length!r}, expected a positive integer, or none where it is unknown")
        if self.num_attention_heads % self.num_key_value_heads:
            raise InputError(
                f"num_attention_heads: got {self.num_attention_heads}, expected a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise InputError(f"draft_vocab_size: got {self.draft_vocab_size}, expected 1 to {self.vocab_size}")
        ids = self.aux_hidden_state_layer_ids
        if any(i < 0 for i in ids) or any(a >= b for a, b in pairwise(ids)):
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
        return self.num_aux_hidden_states * self.target_hidden_size

    @property
    def reduced_vocab(self) -> bool:
        return self.draft_vocab_size != self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def with_aux_layers(config: DrafterConfig, num_layers: int) -> tuple[DrafterConfig, str]:
    """A config whose auxiliary layers are known, and a remark on them, empty where the checkpoint names them.

    A head that names none gets vLLM's default for a target of `num_layers` layers, the layers that it runs on in vLLM.
    Nothing in such a checkpoint says whether it was trained on them, so the remark has to reach the user. Raises
    InputError where the default does not apply.
    """
    if config.aux_hidden_state_layer_ids:
        return config, ""
    ids = vllm_aux_layer_ids(num_layers)
    if config.num_aux_hidden_states != len(ids) or ids[0] >= ids[1] or ids[1] >= ids[2]:
        raise InputError(
            f"eagle_aux_hidden_state_layer_ids: missing, and there is no default for {config.num_aux_hidden_states} "
            f"states of a target of {num_layers} layers"
        )
    remark = (
        f"eagle_aux_hidden_state_layer_ids: not in the head's config, {list(ids)} are taken as in vLLM; a head that "
        "was trained on other layers gets few drafts accepted"
    )
    return replace(config, aux_hidden_state_layer_ids=ids), remark
