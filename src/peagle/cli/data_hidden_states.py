"""`peagle data hidden-states`: what the target computes of every document, written once."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Literal

import typer

from peagle.cli.device_map_flag import TargetDeviceMap
from peagle.cli.ending_signals import ends_on_signals
from peagle.cli.json_flag import json_object
from peagle.errors import InputError


def hidden_states(
    target: Annotated[str, typer.Argument(help="The target: a local folder, a Hub id or a GGUF file.")],
    folders: Annotated[list[Path], typer.Argument(help="Folders of answers; several count as one data set.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder for the states. Run again to go on.")],
    stored: Annotated[
        str, typer.Option("--store", help="bf16, or fp8: half of the size, e4m3 with a scale a row.")
    ] = "bf16",
    aux_layer_ids: Annotated[
        str | None, typer.Option(help="Target layers that the head will read, such as 2,15,27 [2,n/2,n-3].")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(help="Cut longer documents; train with --pack-length up to it.")
    ] = None,
    shard_gib: Annotated[float, typer.Option(help="Size of a shard file.")] = 2.0,
    dtype: Annotated[str, typer.Option(help="The target's: auto (its own on a GPU), float32 or bfloat16.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default a GPU if there is one.")] = None,
    target_device_map: TargetDeviceMap = None,
    engine: Annotated[str, typer.Option(help="peagle (the target in this process), or vllm.")] = "peagle",
    vllm_python: Annotated[
        str, typer.Option(help="The Python of the environment that vLLM is installed in.", show_default="this Python")
    ] = sys.executable,
    vllm_args: Annotated[str, typer.Option(help='JSON for vLLM, e.g. {"tensor_parallel_size": 8}.')] = "{}",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say how much would be written, and stop.")] = False,
) -> None:
    """Write what TARGET computes of every document, for `peagle train --hidden-states`.

    A run of many passes over the data then reads files instead of running the target. The size is said, and the free
    disk looked at, before anything is written; shards carry checksums; a stopped run goes on when started again.
    """
    from peagle.cli.train import parse_layer_ids
    from peagle.config.device_map import parse_device_map
    from peagle.data.dataset import open_dataset
    from peagle.target.loading import load_target
    from peagle.training.write_states import Encode, plan_states, target_encoder, write_states
    from peagle.vllm.states import VllmStates

    if stored not in ("bf16", "fp8"):
        raise InputError(f"--store {stored}: expected bf16 or fp8")
    if shard_gib <= 0 or (max_length is not None and max_length < 3):
        raise InputError("--shard-gib, --max-length: expected a positive size, and 3 tokens or more")
    if engine not in ("peagle", "vllm"):
        raise InputError(f"--engine {engine}: expected peagle or vllm")
    by_vllm = engine == "vllm"
    device_map = parse_device_map(target_device_map, "--target-device-map")
    if by_vllm and device_map is not None:
        raise InputError("--target-device-map: expected none with --engine vllm, whose own flags go into --vllm-args")
    if by_vllm and dtype == "auto":
        dtype = "bfloat16"
    vllm = VllmStates(vllm_python, dtype, json_object(vllm_args, "--vllm-args"))
    computed_in = f"{dtype} by vLLM {vllm.version()}" if by_vllm else None
    answers = open_dataset(folders)
    layers: Literal["none", "device"] = "none" if by_vllm else "device"
    loaded = load_target(target, dtype, "cpu" if by_vllm else device, layers=layers, device_map=device_map)
    if loaded.tokenizer is not None:
        answers.check_target(loaded.tokenizer, loaded.vocab_size)
    shard_bytes = int(shard_gib * 2**30)
    plan = plan_states(loaded, answers, stored, parse_layer_ids(aux_layer_ids), max_length, shard_bytes, computed_in)  # type: ignore[arg-type]
    with ends_on_signals(), ExitStack() as stack:

        def encoder() -> Encode:
            if by_vllm:
                return stack.enter_context(vllm.encoder(loaded, plan.aux_layer_ids, plan.max_length))
            return target_encoder(loaded, plan.aux_layer_ids)

        written = write_states(plan, answers, encoder, output, typer.echo, dry_run)
    if not dry_run:
        typer.echo(f"{output}: {written} shards written, {len(plan.shards)} in all")
