"""The training settings, from flags or a file."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from peagle.config.device_map import DeviceMap, parse_device_map
from peagle.errors import InputError


@dataclass
class TrainConfig:
    """Everything that `peagle train` is told. Checked on construction; errors name the field.

    `target`, `data` and `output` are a model (folder, Hub id or GGUF file), one or several folders of answers, and the
    run's folder. Dimensions left at None are the target's. The run ends at the first limit reached; without any limit
    it makes one pass over the data.
    """

    target: str
    data: tuple[str, ...]
    output: str
    kind: Literal["p-eagle", "eagle3"] = "p-eagle"
    # the head
    layers: int = 2
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    mask_token_id: int | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_embeddings: bool = False
    train_lm_head: bool = False
    init: str = "target"  # "target", "random", or a head to go on from
    # what it learns
    k_train: int = 8  # depths 0..k_train-1; EAGLE-3 takes `ttt_steps` instead
    keep_rate: float = 0.8  # conditional drop
    depth_decay: float = 1.0  # P-EAGLE's loss weight of a depth over the one before
    # loss weight of rows that drafting would not reach: a draft before them is wrong, or the text left the first choice
    unreached_weight: float = 1.0
    ttt_steps: int = 7
    ttt_decay: float = 0.8
    loss: Literal["soft", "hard"] = "soft"
    # batches
    pack_length: int = 8192
    packs_per_step: int = 4
    chunk_size: int | Literal["auto"] = "auto"
    loss_rows: int | Literal["auto"] = "auto"
    # optimizer
    optimizer: Literal["adamw", "muon"] = "adamw"
    lr: float = 4e-4
    min_lr_ratio: float = 0.05
    warmup_steps: int = 100
    schedule: Literal["cosine", "wsd"] = "cosine"
    decay_share: float = 0.3  # of the run, for wsd's linear decay
    ema_decay: float | None = None  # write the moving average of the weights as the head
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0
    seed: int = 0
    # the target's states: run the target (None), or read them from this folder
    hidden_states: str | None = None
    on_corrupt: Literal["stop", "skip"] = "stop"
    # limits
    max_steps: int | None = None
    epochs: int | None = None
    max_samples: int | None = None
    max_minutes: float | None = None
    # housekeeping
    validation_documents: int = 64
    validate_every: int = 500
    log_every: int = 10
    save_every: int = 1000
    save_minutes: float = 10.0
    keep_checkpoints: int = 2
    resume: Literal["auto", "never"] = "auto"
    tensorboard: bool = True
    # the machine
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    attention: Literal["auto", "dense", "flex", "flash"] = "auto"
    compile: Literal["auto", "off"] = "auto"
    loss_kernel: Literal["auto", "compile"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"  # several processes: whole copies, or shards of weights and optimizer
    target_device_map: DeviceMap | None = None  # the target over several devices: a plan's name, or module -> device
    activation_checkpointing: bool = False  # compute the head's layers again in the backward instead of keeping them
    state_cache_gib: float = 0.0  # device memory for target states kept from one epoch to the next

    # fields that a resumed run may change: they decide when it ends and how it runs, not what it computes (chunks and
    # slices of another size round their sums differently)
    FREE: ClassVar[frozenset[str]] = frozenset(
        (
            *("output", "resume", "max_steps", "epochs", "max_samples", "max_minutes"),
            *("validate_every", "log_every", "save_every", "save_minutes", "keep_checkpoints", "tensorboard"),
            *("device", "attention", "compile", "loss_kernel", "state_cache_gib", "on_corrupt", "parallel"),
            *("activation_checkpointing", "target_device_map", "chunk_size", "loss_rows"),
        )
    )

    def __post_init__(self) -> None:
        self.data = (self.data,) if isinstance(self.data, str) else self.data
        self._check_types()
        self.data = tuple(self.data)
        if self.aux_layer_ids is not None:
            self.aux_layer_ids = tuple(self.aux_layer_ids)
        for name in ("target", "output", "init"):
            if not getattr(self, name):
                raise InputError(f"{name}: missing, expected a path or name")
        if self.hidden_states == "":
            raise InputError("hidden_states: got '', expected a folder or none")
        if not self.data or not all(self.data):
            raise InputError("data: missing, expected at least one folder of answers")
        choices: dict[str, tuple[str, ...]] = {
            "kind": ("p-eagle", "eagle3"),
            "loss": ("soft", "hard"),
            "optimizer": ("adamw", "muon"),
            "schedule": ("cosine", "wsd"),
            "resume": ("auto", "never"),
            "on_corrupt": ("stop", "skip"),
            "parallel": ("ddp", "fsdp"),
            "dtype": ("auto", "float32", "bfloat16"),
            "attention": ("auto", "dense", "flex", "flash"),
            "compile": ("auto", "off"),
            "loss_kernel": ("auto", "compile"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name}: got {getattr(self, name)!r}, expected one of {', '.join(allowed)}")
        at_least: dict[str, int] = dict.fromkeys(
            (
                *("layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
                *("head_dim", "max_position_embeddings", "draft_vocab_size", "k_train", "ttt_steps"),
                *("packs_per_step", "chunk_size", "loss_rows", "max_steps", "epochs", "max_samples"),
                *("log_every", "validate_every", "save_every", "keep_checkpoints"),
            ),
            1,
        ) | {"pack_length": 3, "warmup_steps": 0, "validation_documents": 0, "seed": 0, "mask_token_id": 0}
        for name, least in at_least.items():
            value = getattr(self, name)
            if value is None or (value == "auto" and name in ("chunk_size", "loss_rows")):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise InputError(f"{name}: got {value!r}, expected a whole number of {least} or more")
        ranges: dict[str, tuple[float, float]] = {
            "keep_rate": (0.0, 1.0),
            "min_lr_ratio": (0.0, 1.0),
            "ttt_decay": (0.0, 1.0),
            "depth_decay": (0.0, 1.0),
            "unreached_weight": (0.0, 1.0),
            "decay_share": (0.0, 1.0),
            "beta1": (0.0, 0.9999999),
            "beta2": (0.0, 0.9999999),
            "weight_decay": (0.0, math.inf),
            "state_cache_gib": (0.0, math.inf),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise InputError(f"{name}: got {value!r}, expected {low:g} to {high:g}")
        if self.ema_decay is not None and not (_is_number(self.ema_decay) and 0 < self.ema_decay < 1):
            raise InputError(f"ema_decay: got {self.ema_decay!r}, expected a number between 0 and 1 or None")
        for name in ("lr", "grad_clip", "max_minutes", "save_minutes", "ttt_decay", "depth_decay"):
            value = getattr(self, name)
            if value is not None and (not _is_number(value) or not 0 < value < math.inf):
                raise InputError(f"{name}: got {value!r}, expected a number above 0")
        self.target_device_map = parse_device_map(self.target_device_map)
        if self.target_device_map is not None and self.hidden_states is not None:
            raise InputError(
                f"target_device_map: got {self.target_device_map!r}, expected none with hidden_states: the target's "
                "layers do not run"
            )
        if self.unreached_weight != 1 and self.train_lm_head:
            raise InputError(f"unreached_weight: got {self.unreached_weight}, expected 1 with train_lm_head")

    def _check_types(self) -> None:
        """Of texts, switches and lists, which a file may give as something else, and of null. Numbers have ranges."""
        expected: dict[str, tuple[type, str]] = {
            "bool": (bool, "true or false"),
            "str": (str, "a text"),
            "str | None": (str, "a text or none"),
            "int": (object, "a whole number"),
            "int | Literal['auto']": (object, "a whole number or auto"),
            "float": (object, "a number"),
        }
        for field in fields(self):
            kind, what = expected.get(str(field.type), (object, ""))
            value = getattr(self, field.name)
            missing = value is None and what and not what.endswith("or none")
            if missing or not isinstance(value, kind | None):
                raise InputError(f"{field.name}: got {value!r}, expected {what}")
        if not isinstance(self.data, list | tuple) or not all(isinstance(item, str) for item in self.data):
            raise InputError(f"data: got {self.data!r}, expected a folder of answers or a list of folders")
        ids: Any = self.aux_layer_ids
        if ids is not None and not (isinstance(ids, list | tuple) and all(type(item) is int for item in ids)):
            raise InputError(f"aux_layer_ids: got {ids!r}, expected a list of layer ids such as [2, 15, 27]")

    def _refuse_useless(self, given: Iterable[str]) -> None:
        """Raise InputError for a flag that says nothing beside the other settings."""
        p_eagle, eagle3 = (self.kind == "p-eagle", "--kind p-eagle"), (self.kind == "eagle3", "--kind eagle3")
        only: dict[str, tuple[bool, str]] = {
            **dict.fromkeys(("k_train", "keep_rate", "depth_decay", "mask_token_id"), p_eagle),
            **dict.fromkeys(("ttt_steps", "ttt_decay"), eagle3),
            "decay_share": (self.schedule == "wsd", "--schedule wsd"),
        }
        for name in given:
            counts, where = only.get(name, (True, ""))
            if not counts:
                raise InputError(f"--{name.replace('_', '-')}: only for {where}")

    @property
    def depths(self) -> int:
        """Depths trained, depth 0 included."""
        return self.k_train if self.kind == "p-eagle" else self.ttt_steps

    @property
    def init_head(self) -> str | None:
        """The head that the run starts from, where `init` names one."""
        return None if self.init in ("target", "random") else self.init

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def differences(self, saved: Mapping[str, Any]) -> list[str]:
        """`field: saved -> now` of every field that matters and differs from a saved `to_dict`.

        A field that a run of an earlier version did not know had its default then.
        """
        defaults = {f.name: f.default for f in fields(self) if f.default is not MISSING}
        now = json.loads(json.dumps(self.to_dict()))
        before = json.loads(json.dumps(defaults | dict(saved)))
        return [
            f"{name}: {before.get(name)!r} -> {now[name]!r}"
            for name in now
            if name not in self.FREE and before.get(name) != now[name]
        ]

    @classmethod
    def from_sources(cls, file: Path | None, flags: Mapping[str, Any]) -> TrainConfig:
        """A config from a TOML or JSON file (or none) with flags that are not None on top.

        Flags that change nothing are refused; a file may hold settings of both kinds of heads.
        """
        values: dict[str, Any] = {}
        if file is not None:
            values = read_settings(file)
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InputError(f"{file}: {name!r} is no training setting, expected one of {', '.join(sorted(known))}")
        given = {name: value for name, value in flags.items() if value is not None}
        values |= given
        for name in ("target", "data", "output"):
            if name not in values:
                raise InputError(f"{name}: missing, expected it on the command line or in the config file")
        config = cls(**values)
        config._refuse_useless(given)
        return config


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf


def read_settings(file: Path) -> dict[str, Any]:
    """A TOML or JSON file of settings."""
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"config: {file} cannot be read ({error})") from error
    try:
        values = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (json.JSONDecodeError, tomllib.TOMLDecodeError) as error:
        form = "JSON" if file.suffix == ".json" else "TOML"
        raise InputError(f"config: {file} is not valid {form}: {error}") from error
    if not isinstance(values, dict):
        raise InputError(f"config: {file} holds {type(values).__name__}, expected settings by name")
    return values
