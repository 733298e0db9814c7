"""What users write: the JSON of vLLM's --speculative-config, the engine's settings, the training settings."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from peagle.draft_table import DraftTable, parse_draft_table
from peagle.errors import InputError

WeightDtype = Literal["auto", "target", "float16"]
VocabularyChoice = Literal["auto", "listed", "whole"]


def _check_positive(name: str, value: object, or_none: bool = False) -> None:
    if value is None and or_none:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}: got {value!r}, expected a positive integer{' or None' if or_none else ''}")


@dataclass(frozen=True)
class SpeculativeConfig:
    """vLLM's speculative config. parallel_drafting: True for a P-EAGLE head, False for an EAGLE-3 head, None for
    whatever the head is; a head of the other kind is refused when it is loaded.

    rejection_sample_method "synthetic", for benchmarks only, accepts drafts whatever they are, so that what comes out
    is no text: either by synthetic_acceptance_rates, per position how often it and all before it are accepted, or by
    synthetic_acceptance_length, the mean number of tokens a step (1 to num_speculative_tokens + 1).

    num_speculative_tokens_per_batch_size: (first batch size, last, draft tokens) each, see `peagle.draft_table`.

    draft_weight_dtype (not in vLLM): how the drafter's weights, and the LM head as it reads it, are kept: "target" in
    the target's dtype, "float16" halved, which only a CPU with a float32 target can; "auto" halves them where that is
    so. The output stays the target's either way.

    draft_vocabulary (not in vLLM): the tokens that drafts are chosen from: "listed" those of the head's list and those
    of the texts (`peagle.drafter.draft_vocabulary`), which only a CPU with a float32 target can, "whole" all that the
    head knows; "auto" is the former where it can be. No output depends on it.

    confidence_threshold (not in vLLM; a CPU only): drafts whose joint probability, by the drafter, is below it are not
    verified, which saves their rows; 0 verifies all. No output depends on it.
    """

    model: str
    num_speculative_tokens: int
    method: Literal["eagle3"] = "eagle3"
    parallel_drafting: bool | None = None
    rejection_sample_method: Literal["standard", "synthetic"] = "standard"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    num_speculative_tokens_per_batch_size: DraftTable | None = None
    draft_weight_dtype: WeightDtype = "auto"
    draft_vocabulary: VocabularyChoice = "auto"
    confidence_threshold: float = 0.0

    def __post_init__(self) -> None:
        if self.method != "eagle3":
            raise InputError(f"method: got {self.method!r}, expected 'eagle3' (also for P-EAGLE heads)")
        _check_positive("num_speculative_tokens", self.num_speculative_tokens)
        if not isinstance(self.model, str) or not self.model:
            raise InputError(f"model: got {self.model!r}, expected a head's folder or Hub id")
        if self.parallel_drafting not in (None, True, False):
            raise InputError(f"parallel_drafting: got {self.parallel_drafting!r}, expected true or false")
        if (table := self.num_speculative_tokens_per_batch_size) is not None:
            table = parse_draft_table(table, self.num_speculative_tokens)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", table)
        if self.draft_weight_dtype not in get_args(WeightDtype):
            choices = ", ".join(get_args(WeightDtype))
            raise InputError(f"draft_weight_dtype: got {self.draft_weight_dtype!r}, expected one of {choices}")
        if self.draft_vocabulary not in get_args(VocabularyChoice):
            choices = ", ".join(get_args(VocabularyChoice))
            raise InputError(f"draft_vocabulary: got {self.draft_vocabulary!r}, expected one of {choices}")
        threshold = self.confidence_threshold
        if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < 1:
            raise InputError(f"confidence_threshold: got {threshold!r}, expected a number from 0 to less than 1")
        if self.synthetic_acceptance_rates is not None:
            object.__setattr__(self, "synthetic_acceptance_rates", tuple(self.synthetic_acceptance_rates))
        self._check_synthetic()

    def _check_synthetic(self) -> None:
        method, rates, length = (
            self.rejection_sample_method,
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
        )
        k = self.num_speculative_tokens
        if method not in ("standard", "synthetic"):
            raise InputError(f"rejection_sample_method: got {method!r}, expected 'standard' or 'synthetic'")
        if method == "standard":
            if rates is not None or length is not None:
                raise InputError(
                    "synthetic_acceptance_rates, synthetic_acceptance_length: expected only with "
                    "rejection_sample_method 'synthetic'"
                )
        elif (rates is None) == (length is None):
            raise InputError(
                "rejection_sample_method: 'synthetic' needs synthetic_acceptance_rates or synthetic_acceptance_length, "
                "one of the two"
            )
        elif rates is not None:
            falling = all(a >= b for a, b in zip((1.0, *rates), (*rates, 0.0), strict=True))
            if len(rates) != k or not falling:
                raise InputError(
                    f"synthetic_acceptance_rates: got {list(rates)}, expected {k} numbers from 1 to 0, none above the "
                    "one before it"
                )
        elif length is not None and not 1 <= length <= k + 1:
            raise InputError(f"synthetic_acceptance_length: got {length}, expected 1 to {k + 1}")

    @property
    def synthetic_rates(self) -> tuple[float, ...] | None:
        """Per position how often it and all before it are to be accepted; None for real verification.

        A length becomes the rates of least variance, as in vLLM: whole positions first, then what is left.
        """
        if self.rejection_sample_method == "standard" or self.synthetic_acceptance_rates is not None:
            return self.synthetic_acceptance_rates
        assert self.synthetic_acceptance_length is not None
        accepted = self.synthetic_acceptance_length - 1
        return tuple(min(max(accepted - i, 0.0), 1.0) for i in range(self.num_speculative_tokens))

    @property
    def kind(self) -> Literal["p-eagle", "eagle3"] | None:
        """The kind of head that the flag asks for; None leaves it to the head."""
        if self.parallel_drafting is None:
            return None
        return "p-eagle" if self.parallel_drafting else "eagle3"

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """From JSON text, a mapping or a config; a key it does not know is refused by name."""
        if isinstance(value, SpeculativeConfig):
            return value
        settings = speculative_settings(value)
        known = [field.name for field in fields(cls)]
        for key in settings:
            if key not in known:
                raise InputError(f"speculative_config: unknown key {key!r}, expected {', '.join(known)}")
        return cls(**settings)


def speculative_settings(value: str | Mapping[str, Any]) -> dict[str, Any]:
    """The speculative config as a dict, keys that only vLLM knows included; refused without the two it must have."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise InputError(f"speculative_config: {error}, expected a JSON object") from error
    if not isinstance(value, Mapping):
        raise InputError(f"speculative_config: got {value!r}, expected a JSON object")
    for key in ("model", "num_speculative_tokens"):
        if key not in value:
            raise InputError(f"speculative_config: {key} is missing")
    return dict(value)


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine, under vLLM's names.

    max_model_len None: the model's length, or what the KV cache holds. max_num_batched_tokens None: 8192 on a GPU, 1024
    on a CPU, and never less than max_num_seqs. num_kv_blocks None: from gpu_memory_utilization of the card's memory, or
    cpu_kv_cache_gib of the host's. seed: of requests that bring none. num_scheduler_steps: decoding steps between two
    looks of the host; more is faster for large batches without speculation, and tokens arrive in bursts. max_logprobs:
    the most logprobs or prompt_logprobs that a request may ask for a token, -1 for no limit. enable_prefix_caching: a
    prompt's beginning that was computed before, for any request, is not computed again. On a GPU: async_scheduling
    starts a step that only decodes before the host has read the one before it; enforce_eager runs without CUDA graphs;
    max_cudagraph_capture_size is the most rows (K + 1 a request) of a step that is captured, None for up to 1024, 0 for
    none.
    kv_cache_dtype fp8 keeps keys and values of target and drafter in float8 (e4m3, with scale 1): half the memory.
    dynamic_speculation: choose by load how many of num_speculative_tokens drafts to make (a CPU only); None: where it
    can be done.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    num_kv_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    cpu_kv_cache_gib: float = 1.0
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    num_scheduler_steps: int = 1
    async_scheduling: bool = True
    enforce_eager: bool = False
    max_cudagraph_capture_size: int | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    max_logprobs: int = 20
    seed: int = 0
    dynamic_speculation: bool | None = False

    def __post_init__(self) -> None:
        if self.dynamic_speculation not in (None, True, False):
            raise InputError(f"dynamic_speculation: got {self.dynamic_speculation!r}, expected True, False or None")
        for name in ("max_num_seqs", "block_size", "num_scheduler_steps"):
            _check_positive(name, getattr(self, name))
        for name in ("max_model_len", "max_num_batched_tokens", "num_kv_blocks"):
            _check_positive(name, getattr(self, name), or_none=True)
        if self.max_cudagraph_capture_size != 0:
            _check_positive("max_cudagraph_capture_size", self.max_cudagraph_capture_size, or_none=True)
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise InputError(f"kv_cache_dtype: got {self.kv_cache_dtype!r}, expected 'auto' or 'fp8'")
        if isinstance(self.max_logprobs, bool) or not isinstance(self.max_logprobs, int) or self.max_logprobs < -1:
            raise InputError(f"max_logprobs: got {self.max_logprobs!r}, expected -1 (no limit) or 0 or more")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InputError(
                f"gpu_memory_utilization: got {self.gpu_memory_utilization}, expected a number above 0 and at most 1"
            )
        if not self.cpu_kv_cache_gib > 0:
            raise InputError(f"cpu_kv_cache_gib: got {self.cpu_kv_cache_gib}, expected a number above 0")

    def batched_tokens(self, device_type: str, max_model_len: int) -> int:
        """The budget of rows a step, resolved for a device."""
        if self.max_num_batched_tokens is not None:
            tokens = self.max_num_batched_tokens
        else:
            tokens = max(8192 if device_type == "cuda" else 1024, self.max_num_seqs)
            if not self.enable_chunked_prefill:
                tokens = max(tokens, max_model_len)
        if not self.enable_chunked_prefill and tokens < max_model_len:
            raise InputError(
                f"max_num_batched_tokens: got {tokens}, expected at least max_model_len ({max_model_len}) without "
                "chunked prefill"
            )
        return tokens


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
    attention: Literal["auto", "dense", "flex"] = "auto"
    compile: Literal["auto", "off"] = "auto"
    loss_kernel: Literal["auto", "compile"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"  # several processes: whole copies, or shards of weights and optimizer
    state_cache_gib: float = 0.0  # device memory for target states kept from one epoch to the next

    # fields that a resumed run may change: they decide when it ends and how it runs, not what it computes
    FREE: ClassVar[frozenset[str]] = frozenset(
        (
            *("output", "resume", "max_steps", "epochs", "max_samples", "max_minutes"),
            *("validate_every", "log_every", "save_every", "save_minutes", "keep_checkpoints", "tensorboard"),
            *("device", "attention", "compile", "loss_kernel", "state_cache_gib", "on_corrupt", "parallel"),
        )
    )

    def __post_init__(self) -> None:
        self.data = (self.data,) if isinstance(self.data, str) else tuple(self.data)
        if self.aux_layer_ids is not None:
            self.aux_layer_ids = tuple(self.aux_layer_ids)
        for name in ("target", "output", "init"):
            if not getattr(self, name):
                raise InputError(f"{name}: missing, expected a path or name")
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
            "attention": ("auto", "dense", "flex"),
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
            if not isinstance(value, int | float) or not low <= value <= high:
                raise InputError(f"{name}: got {value!r}, expected {low:g} to {high:g}")
        if self.ema_decay is not None and not (isinstance(self.ema_decay, int | float) and 0 < self.ema_decay < 1):
            raise InputError(f"ema_decay: got {self.ema_decay!r}, expected a number between 0 and 1 or None")
        for name in ("lr", "grad_clip", "max_minutes", "save_minutes", "ttt_decay", "depth_decay"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0 < value < math.inf):
                raise InputError(f"{name}: got {value!r}, expected a number above 0")
        if self.unreached_weight != 1 and self.train_lm_head:
            raise InputError(f"unreached_weight: got {self.unreached_weight}, expected 1 with train_lm_head")

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
        """A config from a TOML or JSON file (or none) with flags that are not None on top."""
        values: dict[str, Any] = {}
        if file is not None:
            values = read_settings(file)
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise InputError(f"{file}: {name!r} is no training setting, expected one of {', '.join(sorted(known))}")
        values |= {name: value for name, value in flags.items() if value is not None}
        for name in ("target", "data", "output"):
            if name not in values:
                raise InputError(f"{name}: missing, expected it on the command line or in the config file")
        return cls(**values)


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
