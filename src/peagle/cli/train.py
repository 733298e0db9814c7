"""`peagle train`: a head for a target, from answers that the target wrote."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from peagle.cli.device_map_flag import TargetDeviceMap
from peagle.config.training import TrainConfig
from peagle.errors import InputError


def _size(value: str | None, name: str) -> int | str | None:
    """`auto` or a whole number."""
    if value is None or value == "auto":
        return value
    try:
        return int(value)
    except ValueError:
        raise InputError(f"{name}: got {value!r}, expected auto or a whole number")


def parse_layer_ids(value: str | None) -> tuple[int, ...] | None:
    """`2,15,27` as numbers. Raises InputError."""
    if value is None:
        return None
    try:
        return tuple(int(part) for part in value.split(","))
    except ValueError:
        raise InputError(f"aux_layer_ids: got {value!r}, expected layer ids separated by commas, such as 2,15,27")


def train(
    target: Annotated[str | None, typer.Argument(help="Model folder, Hub id or GGUF file.")] = None,
    data: Annotated[list[str] | None, typer.Argument(help="Folders of answers that `peagle data` wrote.")] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The run's folder; the head goes to head/.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML or JSON file of settings; flags override it.")] = None,
    kind: Annotated[str | None, typer.Option(help="p-eagle (default) or eagle3.")] = None,
    layers: Annotated[int | None, typer.Option(help="Decoder layers of the head [2].")] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Width of the head [the target's].")] = None,
    intermediate_size: Annotated[int | None, typer.Option(help="Width of its MLP [the target's].")] = None,
    num_attention_heads: Annotated[int | None, typer.Option(help="Attention heads [the target's].")] = None,
    num_key_value_heads: Annotated[int | None, typer.Option(help="Key-value heads [the target's].")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Width of an attention head [the target's].")] = None,
    max_position_embeddings: Annotated[int | None, typer.Option(help="Longest context served [the target's].")] = None,
    aux_layer_ids: Annotated[str | None, typer.Option(help="Target layers read, such as 2,15,27 [2,n/2,n-3].")] = None,
    mask_token_id: Annotated[int | None, typer.Option(help="P-EAGLE's mask token [an id that never occurs].")] = None,
    draft_vocab_size: Annotated[int | None, typer.Option(help="Keep the most frequent answer tokens only.")] = None,
    norm_before_residual: Annotated[
        bool | None, typer.Option(help="Layer 0's residual is the normed hidden state.")
    ] = None,
    fc_norm: Annotated[bool | None, typer.Option(help="A norm for each auxiliary state before fc.")] = None,
    norm_output: Annotated[bool | None, typer.Option(help="EAGLE-3 feeds the normed output back.")] = None,
    train_embeddings: Annotated[bool | None, typer.Option(help="Own, trained embeddings [share the target's].")] = None,
    train_lm_head: Annotated[bool | None, typer.Option(help="Own, trained LM head [share the target's].")] = None,
    init: Annotated[
        str | None, typer.Option(help="target (copy its last layers, default), random, or a head to go on from.")
    ] = None,
    k_train: Annotated[int | None, typer.Option(help="Depths a P-EAGLE head learns, depth 0 included [8].")] = None,
    keep_rate: Annotated[
        float | None, typer.Option(help="Chance that a depth is kept after the one before [0.8].")
    ] = None,
    depth_decay: Annotated[
        float | None, typer.Option(help="P-EAGLE's loss weight of a depth over the one before [1].")
    ] = None,
    unreached_weight: Annotated[
        float | None, typer.Option(help="Loss weight of rows behind a draft that would not be accepted [1].")
    ] = None,
    ttt_steps: Annotated[int | None, typer.Option(help="EAGLE-3's training-time test steps [7].")] = None,
    ttt_decay: Annotated[
        float | None, typer.Option(help="EAGLE-3's loss weight of a step over the one before [0.8].")
    ] = None,
    loss: Annotated[str | None, typer.Option(help="soft (KL to the target, default) or hard (cross-entropy).")] = None,
    pack_length: Annotated[int | None, typer.Option(help="Tokens of a pack; longer documents are cut [8192].")] = None,
    packs_per_step: Annotated[int | None, typer.Option(help="Packs of an optimizer step [4].")] = None,
    chunk_size: Annotated[str | None, typer.Option(help="Anchors whose graph is held at a time, or auto.")] = None,
    loss_rows: Annotated[str | None, typer.Option(help="Rows whose logits are held at a time, or auto.")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw (default), or muon for the matrices and AdamW for the rest.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate [4e-4].")] = None,
    min_lr_ratio: Annotated[float | None, typer.Option(help="Final learning rate over the peak [0.05].")] = None,
    warmup_steps: Annotated[int | None, typer.Option(help="Steps of linear warm-up [100, at most a tenth].")] = None,
    schedule: Annotated[
        str | None, typer.Option(help="cosine (default) or wsd: flat, then a linear decay to the end.")
    ] = None,
    decay_share: Annotated[float | None, typer.Option(help="Share of the run that wsd's decay takes [0.3].")] = None,
    ema_decay: Annotated[
        float | None, typer.Option(help="Write the moving average of the weights, such as 0.999 [off].")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(help="On matrices [0.01].")] = None,
    grad_clip: Annotated[float | None, typer.Option(help="Largest gradient norm [1.0].")] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights, order, chains and the validation split [0].")] = None,
    hidden_states: Annotated[
        str | None, typer.Option(help="Folder of `peagle data hidden-states`, read instead of running the target.")
    ] = None,
    on_corrupt: Annotated[
        str | None, typer.Option(help="A corrupt shard of answers or states: stop (default), or skip its documents.")
    ] = None,
    max_steps: Annotated[int | None, typer.Option(help="End after so many steps.")] = None,
    epochs: Annotated[
        int | None, typer.Option(help="End after so many passes over the data [1 without a limit].")
    ] = None,
    max_samples: Annotated[int | None, typer.Option(help="End after so many documents.")] = None,
    max_minutes: Annotated[
        float | None, typer.Option(help="End after so many minutes, with the decay finished by then.")
    ] = None,
    validation_documents: Annotated[int | None, typer.Option(help="Documents held out, at most a tenth [64].")] = None,
    validate_every: Annotated[int | None, typer.Option(help="Steps between validations [500].")] = None,
    log_every: Annotated[int | None, typer.Option(help="Steps between log lines [10].")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between checkpoints [1000].")] = None,
    save_minutes: Annotated[float | None, typer.Option(help="Minutes between checkpoints at most [10].")] = None,
    keep_checkpoints: Annotated[int | None, typer.Option(help="Checkpoints kept [2].")] = None,
    resume: Annotated[str | None, typer.Option(help="auto (go on with the run in OUTPUT, default) or never.")] = None,
    tensorboard: Annotated[bool | None, typer.Option(help="TensorBoard logs where it is installed [yes].")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto (bfloat16 on a GPU), float32 or bfloat16.")] = None,
    attention: Annotated[str | None, typer.Option(help="auto, flash (Hopper; flash-attn-4), flex or dense.")] = None,
    compile: Annotated[str | None, typer.Option(help="auto (on a GPU) or off.")] = None,
    loss_kernel: Annotated[str | None, typer.Option(help="auto (Triton on a GPU) or compile (torch.compile).")] = None,
    parallel: Annotated[
        str | None, typer.Option(help="Under torchrun: ddp (default), or fsdp, which shards a large head.")
    ] = None,
    target_device_map: TargetDeviceMap = None,
    activation_checkpointing: Annotated[
        bool | None, typer.Option(help="Compute the head's layers again in the backward: less memory, slower [no].")
    ] = None,
    state_cache_gib: Annotated[
        float | None, typer.Option(help="Device memory for target states kept between epochs [0].")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be trained, and stop.")] = False,
) -> None:
    """Train a P-EAGLE or EAGLE-3 head for TARGET on the answers in DATA.

    Run the same command again to go on with a run that was stopped or killed.
    """
    flags: dict[str, Any] = dict(locals())
    file = flags.pop("config")
    flags.pop("dry_run")
    flags["data"] = tuple(data) if data else None
    flags["output"] = str(output) if output else None
    flags["aux_layer_ids"] = parse_layer_ids(aux_layer_ids)
    for name in ("chunk_size", "loss_rows"):
        flags[name] = _size(flags[name], name)
    settings = TrainConfig.from_sources(file, flags)

    # packs differ in their numbers of rows; without it the allocator's cache would grow a block a size
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    # compiled kernels outlive the run: the default is a folder below /tmp
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "peagle"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(cache / "triton"))
    from peagle.training.trainer import train as run

    result = run(settings, dry_run=dry_run)
    if result is not None and not result.finished:
        raise typer.Exit(3)
